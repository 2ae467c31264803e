"""A client over a cache in this process."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from chunkcache.documents import Metadata
from chunkcache.errors import DocumentNotFoundError
from chunkcache_retriever.adapters.client import (
    ChatOptions,
    ChatReply,
    ContextPart,
    ModelInfo,
    Passage,
    StoredDocument,
    TextFormat,
    Turn,
)
from chunkcache_retriever.metadata_filter import parse_filter

if TYPE_CHECKING:
    from chunkcache.chunk_cache import ChunkCache
    from chunkcache.planning import AskOptions, ChatTurn, ContextRef
    from chunkcache.results import Answer
    from chunkcache_retriever.retriever import Retriever

_PAGE_DOCUMENTS = 1_000


class LocalClient:
    """Talks to an open cache; see :class:`~chunkcache_retriever.adapters.client.CacheClient`.

    Args:
        cache: Whose documents; its owner closes it.
        retriever: Searches them. None makes one for the first search, as the settings say.
    """

    def __init__(self, cache: "ChunkCache", retriever: "Retriever | None" = None) -> None:
        self._cache = cache
        self._retriever = retriever
        self._lock = threading.Lock()

    def model(self) -> ModelInfo:
        """See :class:`~chunkcache_retriever.adapters.client.CacheClient`."""
        runner = self._cache.runtime.model.runner
        return ModelInfo(runner.name, runner.spec.max_positions)

    def chat(self, turns: Sequence[Turn], options: ChatOptions) -> ChatReply:
        """See :class:`~chunkcache_retriever.adapters.client.CacheClient`."""
        growing = self._cache.chat([_turn(t) for t in turns], self._options(turns, options))
        return _reply(growing.answer())

    def stream(self, turns: Sequence[Turn], options: ChatOptions) -> Iterator[str | ChatReply]:
        """See :class:`~chunkcache_retriever.adapters.client.CacheClient`."""
        with self._cache.chat([_turn(t) for t in turns], self._options(turns, options)) as growing:
            yield from growing
            yield _reply(growing.answer())

    def search(
        self, query: str, top_k: int, filters: Mapping[str, Any] | None = None
    ) -> list[Passage]:
        """See :class:`~chunkcache_retriever.adapters.client.CacheClient`.

        Raises:
            ModelFilesError: The embedder cannot be loaded.
        """
        wanted = None if filters is None else parse_filter(filters)
        return [
            Passage(h.document_id, h.chunk_index, h.score, h.text, h.start, h.end, h.metadata)
            for h in self._searcher().search(query, top_k, wanted)
        ]

    def put(
        self,
        document_id: str,
        text: str,
        metadata: Metadata | None = None,
        text_format: TextFormat = "text",
    ) -> str:
        """See :class:`~chunkcache_retriever.adapters.client.CacheClient`."""
        return self._cache.put(document_id, text, metadata, text_format=text_format).status

    def get(self, document_id: str) -> StoredDocument | None:
        """See :class:`~chunkcache_retriever.adapters.client.CacheClient`."""
        document = self._cache.catalog.get(document_id)
        if document is None:
            return None
        chunks = tuple((c.start, c.end) for c in document.chunks)
        return StoredDocument(document.document_id, document.text, document.metadata, chunks)

    def delete(self, document_id: str) -> bool:
        """See :class:`~chunkcache_retriever.adapters.client.CacheClient`."""
        try:
            self._cache.delete(document_id)
        except DocumentNotFoundError:
            return False
        return True

    def document_ids(self) -> Iterator[str]:
        """See :class:`~chunkcache_retriever.adapters.client.CacheClient`."""
        after: str | None = None
        while page := self._cache.list(after=after, limit=_PAGE_DOCUMENTS):
            yield from (info.document_id for info in page)
            after = page[-1].document_id

    def _searcher(self) -> "Retriever":
        with self._lock:
            if self._retriever is None:
                from chunkcache_retriever.opening import RetrieverParts

                parts = RetrieverParts(self._cache.runtime.settings)
                self._retriever = parts.retriever(self._cache)
            return self._retriever

    def _options(self, turns: Sequence[Turn], options: ChatOptions) -> "AskOptions":
        from chunkcache.engine.sampling import SamplingParams
        from chunkcache.fusion.policies.registry import PolicyOptions
        from chunkcache.planning import AskOptions

        given = {name: getattr(options, name) for name in options.__dataclass_fields__}
        sampling = {name: given.pop(name) for name in ("temperature", "top_p", "seed")}
        ratio = given.pop("recompute_ratio")
        given["as_question"] = options.puts_question(turns)
        if options.max_tokens is None:
            given["max_tokens"] = self._cache.runtime.settings.max_answer_tokens
        return AskOptions(
            **given,
            sampling=SamplingParams(**sampling),
            policy_options=PolicyOptions(recompute_ratio=ratio),
        )


def _turn(turn: Turn) -> "ChatTurn":
    from chunkcache.planning import ChatTurn

    return ChatTurn(turn.text, tuple(_context(p) for p in turn.context), turn.reply)


def _context(part: ContextPart) -> "ContextRef":
    from chunkcache.loose_text import TextRef
    from chunkcache.planning import DocumentRef

    if part.text is not None:
        return TextRef(part.document_id, part.text)
    return DocumentRef(part.document_id, part.chunk_indexes)


def _reply(answer: "Answer") -> ChatReply:
    return ChatReply(
        answer.id, answer.model, answer.text, answer.finish_reason, answer.usage, answer.reuse()
    )
