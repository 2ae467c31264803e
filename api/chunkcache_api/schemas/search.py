"""The body of ``POST /v1/search``, and what it shares with ``POST /v1/query``."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from chunkcache_api.schemas.query_text import PromptText
from chunkcache_retriever.metadata_filter import parse_filter
from chunkcache_retriever.retriever import MAX_TOP_K


def _check_filter(value: dict[str, Any]) -> dict[str, Any]:
    parse_filter(value)
    return value


FilterObject = Annotated[dict[str, Any], AfterValidator(_check_filter)]
"""``{"type": "eq", "key": "year", "value": 2024}``, or ``{"type": "and", "filters": [...]}``."""
TopK = Annotated[int, Field(ge=1, le=MAX_TOP_K)]


class SearchRequest(BaseModel):
    """What to look for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    query: PromptText
    """The question."""
    top_k: TopK = 5
    """At most so many passages."""
    filters: FilterObject | None = None
    """Only passages of documents whose metadata match."""
