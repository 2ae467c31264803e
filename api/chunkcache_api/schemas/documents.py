"""The bodies and parameters of ``/v1/documents``."""

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from chunkcache.splitting import TextFormat

MAX_PAGE = 1_000


def check_finite(value: Any) -> Any:
    """JSON has no infinities, but ``1e999`` reads as one and could not be given back."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, float) and not math.isfinite(item):
            raise ValueError("holds a number that is not finite")
    return value


class PutDocumentRequest(BaseModel):
    """A document to store."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str
    """The document."""
    metadata: Annotated[dict[str, Any], AfterValidator(check_finite)] = Field(default_factory=dict)
    """Returned as given; never part of a prompt."""
    format: TextFormat = "text"
    """How to cut it."""
    digest: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    """Expected BLAKE3 of the text in hex; another one is refused with 409."""
    expires_at: float | None = None
    """Unix seconds from which on it is as if it had been deleted; none is never."""
    ttl_seconds: float | None = None
    """The same, counted from now."""


class ListDocumentsParams(BaseModel):
    """Which documents to list."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    after: str | None = None
    """Begin behind this id."""
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] = 100
    """At most so many."""
    include: Literal["tiers"] | None = None
    """``tiers``: also say how many chunks of each document are in which tier."""
