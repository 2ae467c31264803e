"""The bodies of ``/v1/cache/pins``."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_DOCUMENTS = 1_000
MAX_SECONDS = 30 * 24 * 3600

DocumentIds = Annotated[list[str], Field(min_length=1, max_length=MAX_DOCUMENTS)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]


class PinRequest(BaseModel):
    """Documents to keep in RAM, or to expect a use of: one of the two times."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    document_ids: DocumentIds
    """The documents."""
    ttl_s: Seconds | None = None
    """Keep them for so many seconds, whatever else comes."""
    next_use_s: Seconds | None = None
    """They will be asked about in so many seconds."""


class UnpinRequest(BaseModel):
    """Documents whose pins end."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    document_ids: DocumentIds
    """The documents."""
