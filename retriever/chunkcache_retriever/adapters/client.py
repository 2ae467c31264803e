"""What adapters ask of a cache, wherever it is: in this process, or behind a server's REST API.

Plain values, so that an adapter over a server loads neither models nor indexes. Knows no framework.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, runtime_checkable

from chunkcache.documents import Metadata
from chunkcache.errors import InvalidValueError

TextFormat = Literal["text", "markdown"]
OnMiss = Literal["prefill", "error", "skip"]
DEFAULT_TOP_K = 5


@dataclass(frozen=True)
class ContextPart:
    """What stands in front of a message: a stored document, some chunks of it, or a text.

    Attributes:
        document_id: The document; with ``text`` what reports call it.
        chunk_indexes: Which of its chunks, ascending; None is all.
        text: A text that is matched by its content, and not stored; None looks the document up.
    """

    document_id: str
    chunk_indexes: tuple[int, ...] | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        """A text has no chunks of a stored document.

        Raises:
            InvalidValueError: Both are given.
        """
        if self.text is not None and self.chunk_indexes is not None:
            raise InvalidValueError(
                "chunk_indexes are of a stored document; it comes without a text", param="documents"
            )


@dataclass(frozen=True)
class Turn:
    """A message of a user.

    Attributes:
        text: The message.
        context: What stands in front of it, in order.
        reply: What was answered; None for the last message, which is to be answered.
    """

    text: str
    context: tuple[ContextPart, ...] = ()
    reply: str | None = None


@dataclass(frozen=True)
class ChatOptions:
    """How a conversation goes on; fields of None take the cache's own value.

    Attributes:
        system: System prompt.
        max_tokens: Largest number of answer tokens.
        temperature: 0 is greedy.
        top_p: Keep the most likely tokens whose probabilities add up to this.
        seed: Seed of the draws.
        stop: Strings that end the answer, and are not part of it.
        policy: Recompute policy.
        recompute_ratio: Share of the chunk tokens that run again.
        on_miss: What to do about a chunk that is not cached.
        verify: Also run the full prefill, and say how close the answer is.
        json_schema: The answer is JSON of this schema.
        as_question: Put a single message with documents as ``ChunkCache.answer`` puts its question:
            asked to be answered in one short sentence. Without, it stands as it is.
    """

    system: str | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    policy: str | None = None
    recompute_ratio: float | None = None
    on_miss: OnMiss = "prefill"
    verify: bool = False
    json_schema: Mapping[str, Any] | None = None
    as_question: bool = True

    def puts_question(self, turns: Sequence[Turn]) -> bool:
        """Whether a conversation is put as a question."""
        return self.as_question and len(turns) == 1 and bool(turns[0].context)


CALL_OPTIONS: Final = tuple(
    name for name in ChatOptions.__dataclass_fields__ if name not in ("system", "stop", "verify")
)
"""What adapters take with a call as well; a framework says the others in its own words."""


@dataclass(frozen=True)
class ModelInfo:
    """The model that answers.

    Attributes:
        name: Its name.
        max_positions: Tokens that a prompt and its answer may have.
    """

    name: str
    max_positions: int


@dataclass(frozen=True)
class ChatReply:
    """A finished answer.

    Attributes:
        id: The server's id of it.
        model: The model's name.
        text: The answer.
        finish_reason: ``stop`` or ``length``.
        usage: Tokens under OpenAI's names, ``prompt_tokens_details`` included.
        reuse: What was reused and what was run: the block ``chunkcache`` of a response.
    """

    id: str
    model: str
    text: str
    finish_reason: str
    usage: Mapping[str, Any]
    reuse: Mapping[str, Any]


@dataclass(frozen=True)
class Passage:
    """A chunk that a search found.

    Attributes:
        document_id: The document that holds it.
        chunk_index: Which of its chunks it is.
        score: Ranks the passages of one search.
        text: The passage: ``[start, end)`` of the document's text.
        start: First character.
        end: One past the last.
        metadata: The document's.
    """

    document_id: str
    chunk_index: int
    score: float
    text: str
    start: int
    end: int
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True)
class StoredDocument:
    """A document as it is stored.

    Attributes:
        document_id: Its id.
        text: Its text.
        metadata: As it was given.
        chunks: Where each chunk stands in the text: first character, one past the last.
    """

    document_id: str
    text: str
    metadata: Metadata
    chunks: tuple[tuple[int, int], ...]


@runtime_checkable
class CacheClient(Protocol):
    """One tenant's documents. Safe to use from several threads.

    Every method raises a :class:`~chunkcache.errors.ChunkCacheError` with the code that the REST
    API gives, whatever is behind it.
    """

    def model(self) -> ModelInfo:
        """What answers."""
        ...

    def chat(self, turns: Sequence[Turn], options: ChatOptions) -> ChatReply:
        """The answer to a conversation, once it is whole."""
        ...

    def stream(self, turns: Sequence[Turn], options: ChatOptions) -> Iterator[str | ChatReply]:
        """The answer piece by piece, and then as a whole. Closing the iterator ends the request."""
        ...

    def search(
        self, query: str, top_k: int, filters: Mapping[str, Any] | None = None
    ) -> list[Passage]:
        """The best passages for a question, the best first.

        Args:
            query: The question.
            top_k: At most so many.
            filters: Only documents whose metadata match (docs/retrieval.md).
        """
        ...

    def put(
        self,
        document_id: str,
        text: str,
        metadata: Metadata | None = None,
        text_format: TextFormat = "text",
    ) -> str:
        """Store a document and cache its chunks; says ``created``, ``updated`` or ``unchanged``."""
        ...

    def get(self, document_id: str) -> StoredDocument | None:
        """A document, or None if there is none of that id."""
        ...

    def delete(self, document_id: str) -> bool:
        """Remove a document from every tier; False if there was none of that id."""
        ...

    def document_ids(self) -> Iterator[str]:
        """Every document's id, in order."""
        ...
