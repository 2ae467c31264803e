"""The body of ``POST /v1/precache``, and the parameters of ``/v1/jobs``."""

from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from chunkcache.splitting import TextFormat
from chunkcache_api.paging import Order
from chunkcache_api.schemas.documents import check_finite
from chunkcache_api.schemas.query import GivenDocumentId

MAX_JOB_DOCUMENTS: Final = 10_000


class NewDocument(BaseModel):
    """A document to store and cache."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: GivenDocumentId
    """Its id."""
    text: str
    """The document."""
    metadata: Annotated[dict[str, Any], AfterValidator(check_finite)] = Field(default_factory=dict)
    """Returned as given; never part of a prompt."""
    format: TextFormat = "text"
    """How to cut it."""


class PrecacheRequest(BaseModel):
    """What to cache: new documents, stored ones, or both; without either, every stored one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    documents: Annotated[list[NewDocument], Field(max_length=MAX_JOB_DOCUMENTS)] | None = None
    """Documents to store and cache."""
    document_ids: Annotated[list[GivenDocumentId], Field(max_length=MAX_JOB_DOCUMENTS)] | None = (
        None
    )
    """Documents that are stored: those of their chunks that have no entry are prefilled."""


class CancelRequest(BaseModel):
    """Takes no fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ListJobsParams(BaseModel):
    """Which jobs to list."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    after: str | None = None
    """Begin behind this id."""
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    """At most so many."""
    order: Order = "desc"
    """The oldest or the newest first."""
