"""From a question to ranked chunks: by meaning, by words, or by both fused.

Knows indexes and chunk ids, neither documents nor where passages stand.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from chunkcache.errors import InvalidValueError
from chunkcache.identity import ChunkId
from chunkcache_retriever.embedder import Embedder, Vectors, embed_long
from chunkcache_retriever.index import ChunkIndex, ScoredChunk
from chunkcache_retriever.rank_fusion import reciprocal_rank_fusion
from chunkcache_retriever.word_index import WordIndex

RankingKind = Literal["hybrid", "dense", "bm25"]
"""``dense``: by the cosine between question and passage, -1 to 1. ``bm25``: by the words that they
share; the score is BM25's, above 0, and only passages that share one are found. ``hybrid``: both,
joined by reciprocal rank fusion; the score is its sum, which has a meaning in one search only."""

FUSION_K = 2
"""Less than the usual 60: what one ranking puts first should be among the first of both. Measured in
docs/retrieval.md."""

_MIN_DEPTH = 100
_DEPTH_PER_RESULT = 2


@dataclass(frozen=True)
class SearchedQuery:
    """A question, ready to be searched for.

    Attributes:
        text: Its text.
        vectors: ``[windows, dim]``; None for a ranking that needs none.
    """

    text: str
    vectors: Vectors | None


class ChunkRanker:
    """Ranks the chunks of two indexes that hold the same chunks. Safe to use from several threads.

    Args:
        embedder: Embeds questions.
        index: The chunks' vectors.
        words: Their words; may be left out for ``dense``.
        kind: What to rank by.

    Raises:
        InvalidValueError: There is no such ranking.
    """

    def __init__(
        self, embedder: Embedder, index: ChunkIndex, words: WordIndex | None, kind: RankingKind
    ) -> None:
        if kind not in get_args(RankingKind):
            raise InvalidValueError(f"there is no ranking {kind!r}", param="ranking")
        assert words is not None or kind == "dense"
        self._embedder = embedder
        self._index = index
        self._words = words
        self._kind = kind

    def prepare(self, text: str) -> SearchedQuery:
        """Embed a question, if that is needed.

        Raises:
            InvalidValueError: It holds no text to embed.
            ModelError: The embedder does not do what it says.
        """
        if self._kind == "bm25":
            return SearchedQuery(text, None)
        rows = embed_long(self._embedder, text, is_query=True)
        if not rows:
            raise InvalidValueError("the query holds no text to embed", param="query")
        return SearchedQuery(text, np.stack(rows))

    def rank(
        self, query: SearchedQuery, k: int, among: Collection[ChunkId] | None = None
    ) -> list[ScoredChunk]:
        """The best chunks first; fewer than ``k`` only if there are no more.

        Args:
            query: What to search for.
            k: At most so many, 1 or more.
            among: Only these; None is all.

        Raises:
            InvalidValueError: The embedder gave a vector that cannot be searched for.
        """
        if self._kind == "dense":
            return self._by_meaning(query, k, among)
        if self._kind == "bm25":
            return self._by_words(query, k, among)
        depth = max(_MIN_DEPTH, _DEPTH_PER_RESULT * k)
        rankings = [
            [scored.chunk_id for scored in self._by_meaning(query, depth, among)],
            [scored.chunk_id for scored in self._by_words(query, depth, among)],
        ]
        fused = reciprocal_rank_fusion(rankings, k=FUSION_K)
        return [ScoredChunk(chunk_id, score) for chunk_id, score in fused[:k]]

    def _by_meaning(
        self, query: SearchedQuery, k: int, among: Collection[ChunkId] | None
    ) -> list[ScoredChunk]:
        assert query.vectors is not None
        return self._index.search(query.vectors, k, among)

    def _by_words(
        self, query: SearchedQuery, k: int, among: Collection[ChunkId] | None
    ) -> list[ScoredChunk]:
        assert self._words is not None
        return self._words.search(query.text, k, among)
