"""The lines of ``POST /v1/documents``, and the body of ``POST /v1/documents/lookup``."""

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from chunkcache.errors import InvalidValueError
from chunkcache_api.schemas.documents import PutDocumentRequest
from chunkcache_api.schemas.query import GivenDocumentId
from chunkcache_api.schemas.query_text import PromptText

MAX_LOOKUPS: Final = 1_000
MAX_TEXTS: Final = 100

NDJSON_TYPES: Final = ("application/x-ndjson", "application/ndjson", "application/jsonl")


class BulkDocument(PutDocumentRequest):
    """A line: a document to store, with its id."""

    id: GivenDocumentId
    """The document's id."""


BULK_SCHEMA: Final = {
    "requestBody": {
        "required": True,
        "description": "One object a line: id, and the fields of PUT /v1/documents/{id}.",
        "content": {NDJSON_TYPES[0]: {"schema": {"type": "string"}}},
    }
}
"""``openapi_extra`` of the route."""


class LookupRequest(BaseModel):
    """What to look up."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    document_ids: Annotated[list[GivenDocumentId], Field(max_length=MAX_LOOKUPS)] = Field(
        default_factory=list
    )
    """Documents."""
    texts: Annotated[list[PromptText], Field(max_length=MAX_TEXTS)] = Field(default_factory=list)
    """Texts, matched by content as in a conversation."""

    @model_validator(mode="after")
    def _check_any(self) -> "LookupRequest":
        if not self.document_ids and not self.texts:
            raise InvalidValueError("give document_ids or texts", param="document_ids")
        return self
