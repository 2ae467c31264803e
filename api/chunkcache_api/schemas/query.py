"""The body of ``POST /v1/query``."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from chunkcache.documents import MAX_DOCUMENT_ID_CHARS
from chunkcache.engine.sampling import SamplingParams
from chunkcache.errors import InvalidValueError
from chunkcache.fusion.policies.registry import PolicyOptions
from chunkcache.planning import AskOptions
from chunkcache_api.schemas.query_text import PromptText
from chunkcache_api.schemas.search import FilterObject, TopK

DEFAULT_MAX_TOKENS = AskOptions().max_tokens

FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
SmallInt = Annotated[int, Field(ge=0, le=1 << 31)]
Name = Annotated[str, Field(max_length=200)]
"""Short enough to be quoted in an error's message."""
GivenDocumentId = Annotated[str, Field(max_length=MAX_DOCUMENT_ID_CHARS)]


class ReuseOptions(BaseModel):
    """What is particular to this service."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: Name | None = None
    """Recompute policy; the server's default if left out."""
    recompute_ratio: Annotated[FiniteFloat, Field(ge=0.0, le=1.0)] | None = None
    """Share of the chunk tokens that run again, for policies with a ratio."""
    first_tokens: SmallInt | None = None
    """Tokens at each chunk's start that run again (``lego``, ``hybrid``)."""
    layers: Name | None = None
    """Layers of the attention signal: ``all``, ``upper``, ``late``, ``last`` or ``a-b``."""
    aggregation: Literal["sum", "l2"] | None = None
    """How attention is summed (``query``)."""
    chunk_floor: Annotated[FiniteFloat, Field(ge=0.0, le=1.0)] | None = None
    """Share of the ratio that every chunk gets, whatever its attention (``query``, ``hybrid``)."""
    per_chunk: bool | None = None
    """Whether offsets are averaged chunk by chunk, not over the prompt (``shift``)."""
    target_kl: Annotated[FiniteFloat, Field(gt=0.0, le=10.0)] | None = None
    """How close the answer is to come: mean KL divergence in nats (``auto``)."""
    on_miss: Literal["prefill", "error", "skip"] = "prefill"
    """What to do about a chunk that is not cached."""
    verify: bool = False
    """Also run the full prefill, and report how close the answer is."""
    dry_run: bool = False
    """Return what would run, without running the model."""
    show_prompt: bool = False
    """Also return the prompt that was run, piece by piece, with what became of each."""

    def policy_options(self) -> PolicyOptions:
        """The policy's parameters, as the library takes them."""
        return PolicyOptions(
            recompute_ratio=self.recompute_ratio,
            first_tokens=self.first_tokens,
            layers=self.layers,
            aggregation=self.aggregation,
            chunk_floor=self.chunk_floor,
            per_chunk=self.per_chunk,
            target_kl=self.target_kl,
        )


class QueryRequest(BaseModel):
    """A question over documents."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    query: PromptText
    """The question."""
    document_ids: Annotated[list[GivenDocumentId], Field(fail_fast=True)] | None = None
    """The documents, in the order they should stand in the prompt; or give ``top_k``."""
    top_k: TopK | None = None
    """How many chunks to retrieve for the question, instead of ``document_ids``."""
    filters: FilterObject | None = None
    """Retrieve from documents alone whose metadata match."""
    model: Name | None = None
    """Must be the served model's name, if given."""
    system: PromptText | None = None
    """System prompt; the server's default if left out."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Largest number of answer tokens; 64 if left out (or the server's limit, if less)."""
    temperature: Annotated[FiniteFloat, Field(ge=0.0, le=2.0)] = 0.0
    """0 is greedy."""
    top_p: Annotated[FiniteFloat, Field(gt=0.0, le=1.0)] = 1.0
    """Keep the most likely tokens whose probabilities add up to this."""
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] = 0
    """Seed of the draws."""
    stream: bool = False
    """Answer as server-sent events."""
    chunkcache: ReuseOptions = ReuseOptions()
    """What is particular to this service."""

    @model_validator(mode="after")
    def _check_together(self) -> "QueryRequest":
        if (self.document_ids is None) == (self.top_k is None):
            raise InvalidValueError("give either document_ids or top_k", param="document_ids")
        if self.filters is not None and self.top_k is None:
            raise InvalidValueError(
                "filters are of a search: give top_k with them", param="filters"
            )
        if self.stream and self.chunkcache.dry_run:
            raise InvalidValueError("a dry run cannot be streamed", param="stream")
        return self

    def ask_options(self, max_answer_tokens: int) -> AskOptions:
        """The same, as the library takes it.

        Args:
            max_answer_tokens: The server's limit, for requests that set none.
        """
        reuse = self.chunkcache
        default = min(DEFAULT_MAX_TOKENS, max_answer_tokens)
        return AskOptions(
            policy=reuse.policy,
            policy_options=reuse.policy_options(),
            system=self.system,
            max_tokens=default if self.max_tokens is None else self.max_tokens,
            sampling=SamplingParams(self.temperature, self.top_p, seed=self.seed),
            on_miss=reuse.on_miss,
            verify=reuse.verify,
        )
