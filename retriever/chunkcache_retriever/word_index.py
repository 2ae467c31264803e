"""A BM25 index of chunks by their words. Knows words and chunk ids, not documents.

BM25: S. Robertson, H. Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009, in
Lucene's form, computed by ``bm25s`` (X. H. Lù, arXiv:2407.03618), which scores every word of every
chunk beforehand. A chunk's score depends on all the others, so a change makes the scores anew from
the words that are kept here; a search always sees one whole state.
"""

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import bm25s
import numpy as np
import numpy.typing as npt

from chunkcache.identity import ChunkId
from chunkcache_retriever.index import ScoredChunk
from chunkcache_retriever.words import words_of

K1 = 1.2
B = 0.75


WordIds = npt.NDArray[np.int32]


@dataclass(frozen=True)
class _State:
    """One whole state of the index; never changed once it is in place.

    Attributes:
        vocabulary: The number of each word that some chunk holds.
        word_ids: Per chunk its words' numbers.
        chunk_ids: The chunks in ascending order: a chunk's place is its number in ``scorer``.
        scorer: None where no chunk has a word.
    """

    vocabulary: Mapping[str, int]
    word_ids: Mapping[ChunkId, WordIds]
    chunk_ids: tuple[ChunkId, ...] = ()
    scorer: Any = None


class WordIndex:
    """Words of chunks. Safe to use from several threads."""

    def __init__(self) -> None:
        self._state = _State({}, {})
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Chunks."""
        return len(self._state.word_ids)

    def __contains__(self, chunk_id: object) -> bool:
        return chunk_id in self._state.word_ids

    def update(self, add: Mapping[ChunkId, str], *, remove: Iterable[ChunkId] = ()) -> None:
        """Remove chunks and add others, as one step.

        Args:
            add: Texts; one that is there already is replaced.
            remove: Chunks; those that are not there are passed over.
        """
        with self._lock:
            old = self._state
            gone = {*remove, *add}
            word_ids = {c: ids for c, ids in old.word_ids.items() if c not in gone}
            vocabulary = dict(old.vocabulary)
            if len(word_ids) < len(old.word_ids):
                vocabulary, word_ids = _without_unused(vocabulary, word_ids)
            for chunk_id, text in add.items():
                numbers = [vocabulary.setdefault(w, len(vocabulary)) for w in words_of(text)]
                word_ids[chunk_id] = np.array(numbers, dtype=np.int32)
            chunk_ids = tuple(sorted(word_ids))
            scorer = _scorer(vocabulary, [word_ids[c] for c in chunk_ids])
            self._state = _State(vocabulary, word_ids, chunk_ids, scorer)

    def search(
        self, query: str, k: int, among: Collection[ChunkId] | None = None
    ) -> list[ScoredChunk]:
        """The chunks that hold words of a query, the best first; of equal ones, the smaller id.

        Args:
            query: Any text.
            k: At most so many chunks, 1 or more.
            among: Only these; None is all.
        """
        state = self._state
        numbers = [state.vocabulary[w] for w in words_of(query) if w in state.vocabulary]
        if state.scorer is None or not numbers:
            return []
        scores = state.scorer.get_scores(numbers)
        found = np.flatnonzero(scores > 0)
        if among is not None:
            found = np.array([i for i in found if state.chunk_ids[i] in among], dtype=np.int64)
        # Chunks are numbered in ascending order, so a stable sort has the smaller id first.
        best = found[np.argsort(-scores[found], kind="stable")][:k]
        return [ScoredChunk(state.chunk_ids[i], float(scores[i])) for i in best]


def _without_unused(
    vocabulary: Mapping[str, int], word_ids: Mapping[ChunkId, WordIds]
) -> tuple[dict[str, int], dict[ChunkId, WordIds]]:
    """Number the words anew that are still held: what was deleted leaves no word behind."""
    held = np.zeros(len(vocabulary), dtype=bool)
    for ids in word_ids.values():
        held[ids] = True
    renumbered = (np.cumsum(held) - 1).astype(np.int32)
    kept = {word: int(renumbered[i]) for word, i in vocabulary.items() if held[i]}
    return kept, {c: renumbered[ids] for c, ids in word_ids.items()}


def _scorer(vocabulary: Mapping[str, int], word_ids: list[WordIds]) -> Any:
    if not vocabulary:
        return None
    scorer = bm25s.BM25(k1=K1, b=B, method="lucene")
    corpus = ([ids.tolist() for ids in word_ids], vocabulary)
    scorer.index(corpus, create_empty_token=False, show_progress=False)
    return scorer
