"""Reranking with the generator itself, over the keys and values that answers use."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from chunkcache.query_likelihood import QueryLikelihood
from chunkcache_retriever.rerank.reranker import Candidate

if TYPE_CHECKING:
    from chunkcache.chunk_cache import ChunkCache


class KvReranker:
    """Scores a passage by how likely the model holds the question to be behind it.

    Only the question's rows run (:mod:`chunkcache.query_likelihood`), and no other model is loaded.

    Args:
        cache: Whose chunks are scored.

    Raises:
        UnsupportedModelError: The model's chunks cannot be scored.
    """

    def __init__(self, cache: "ChunkCache") -> None:
        self._cache = cache
        self._runtime = cache.runtime
        self._likelihood = QueryLikelihood(cache.runtime, cache.catalog)

    def scores(self, query: str, candidates: Sequence[Candidate]) -> list[float]:
        """See :class:`~chunkcache_retriever.rerank.reranker.Reranker`: mean log probabilities."""
        runtime = self._cache.runtime
        if runtime is not self._runtime:
            self._likelihood = QueryLikelihood(runtime, self._cache.catalog)
            self._runtime = runtime
        return self._likelihood.scores(query, [c.token_ids for c in candidates])
