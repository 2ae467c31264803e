"""The bodies and parameters of ``/v1/vector_stores``: OpenAI's, as far as they are implemented."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool

from chunkcache_api.paging import Order
from chunkcache_api.schemas.query import FiniteFloat, GivenDocumentId
from chunkcache_api.schemas.query_text import PromptText
from chunkcache_api.schemas.search import FilterObject

MAX_FILE_IDS: Final = 500
MAX_PAIRS: Final = 16
MAX_QUERIES: Final = 8
MAX_RESULTS: Final = 50

Key = Annotated[str, Field(max_length=64)]
Label = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[Key, Label], Field(max_length=MAX_PAIRS)]
Attributes = Annotated[
    dict[Key, Label | StrictBool | int | FiniteFloat], Field(max_length=MAX_PAIRS)
]

STORE_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "chunking_strategy": ({"type": "auto"},),
    "expires_after": (),
}
FILE_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {"chunking_strategy": ({"type": "auto"},)}
SEARCH_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {"rewrite_query": (False,)}
"""Parameters that are not implemented, with the values that ask for nothing (and null)."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class CreateVectorStoreRequest(BaseModel):
    """A set of files."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Label | None = None
    """What people call it."""
    description: Label | None = None
    """What it is for."""
    metadata: Metadata | None = None
    """Returned as given."""
    file_ids: Annotated[list[GivenDocumentId], Field(max_length=MAX_FILE_IDS)] | None = None
    """What is in it from the start."""


class UpdateVectorStoreRequest(BaseModel):
    """What else to say of a set; what is left out stays."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Label | None = None
    """What people call it."""
    metadata: Metadata | None = None
    """Returned as given."""


class AttachFileRequest(BaseModel):
    """A file that joins a set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file_id: GivenDocumentId
    """The file, or any document."""
    attributes: Attributes | None = None
    """What is said of it there, for filters."""


class UpdateFileRequest(BaseModel):
    """What is said of a file in a set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    attributes: Attributes
    """Instead of what was said before."""


class RankingOptions(BaseModel):
    """Which results to return."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ranker: Literal["auto", "none"] | None = None
    """The server's own, whichever is given."""
    score_threshold: FiniteFloat = 0.0
    """None with a lower score."""


class SearchVectorStoreRequest(BaseModel):
    """What to look for in a set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    query: Annotated[
        list[PromptText],
        BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
        Field(min_length=1, max_length=MAX_QUERIES),
    ]
    """One question, or several: the best results to any of them."""
    max_num_results: Annotated[int, Field(ge=1, le=MAX_RESULTS)] = 10
    """At most so many."""
    filters: FilterObject | None = None
    """Only files whose attributes there, or whose metadata, match."""
    ranking_options: RankingOptions = RankingOptions()
    """Which of them."""


class ListParams(BaseModel):
    """Which of them to list."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    after: str | None = None
    """Begin behind this id."""
    before: str | None = None
    """End in front of this id."""
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    """At most so many."""
    order: Order = "desc"
    """The oldest or the newest first."""


class ListFilesParams(ListParams):
    """Which files of a set to list."""

    filter: Literal["in_progress", "completed", "failed", "cancelled"] | None = None
    """Only those in this state; all of them are completed."""
