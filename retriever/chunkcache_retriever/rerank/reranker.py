"""What a reranker is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from chunkcache.identity import ChunkId

DEFAULT_DEPTH = 20
"""Passages of the first ranking that are scored again."""


@dataclass(frozen=True)
class Candidate:
    """A passage to be scored.

    Attributes:
        chunk_id: Its chunk.
        text: What it says.
        token_ids: The chunk's tokens.
    """

    chunk_id: ChunkId
    text: str
    token_ids: tuple[int, ...]


class Reranker(Protocol):
    """Scores passages for a question. Safe to use from several threads."""

    def scores(self, query: str, candidates: Sequence[Candidate]) -> Sequence[float]:
        """One number per candidate, the more, the better; what it means is the reranker's matter.

        Raises:
            ChunkCacheError: It cannot score; the search fails with it.
        """
        ...
