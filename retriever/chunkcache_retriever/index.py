"""A FAISS index of chunks by meaning. Knows vectors and chunk ids, not documents.

It is derived: the vectors themselves are kept in the store, in the transactions of the documents
that they come from, and nothing of the index is written to disk. So a deleted document's vectors are
nowhere, and a damaged or foreign index file cannot be loaded.

A change builds a new index beside the old one and then takes its place, so a search always sees
one whole state without waiting, and an error or a fork in the middle of a change leaves the state
as it was. A change therefore copies all vectors: give changes in batches.

Searches and changes run in the calling thread alone: FAISS's own threads do not survive a fork,
and a flat search of one query is bound by memory.
"""

import itertools
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import faiss
import numpy as np
import numpy.typing as npt

from chunkcache.errors import InvalidValueError
from chunkcache.identity import ChunkId
from chunkcache_retriever.embedder import Vectors
from chunkcache_retriever.index_form import IndexForm, form_for

MAX_COMPARED = 20_000
"""Of an inexact form, so many vectors that a filter leaves are compared one by one."""
_MAX_DEAD_PART = 3


@dataclass(frozen=True)
class ScoredChunk:
    """A chunk that a search found.

    Attributes:
        chunk_id: The chunk.
        score: The more, the better; of a search by vectors the cosine of the angle to the chunk's
            nearest one, -1 to 1.
    """

    chunk_id: ChunkId
    score: float


@dataclass(frozen=True)
class _State:
    """One whole state of the index; never changed once it is in place."""

    vectors: Any
    form: IndexForm
    ids: Mapping[ChunkId, tuple[int, ...]]
    owners: Mapping[int, ChunkId]

    @property
    def num_dead(self) -> int:
        """Vectors without an owner, which a graph or a cell still holds."""
        return self.vectors.ntotal - len(self.owners)


class ChunkIndex:
    """Vectors of chunks, several per chunk if need be. Safe to use from several threads.

    Args:
        dim: Numbers per vector.
        factory: Which FAISS index (:mod:`chunkcache_retriever.index_form`); None chooses by size.

    Raises:
        InvalidValueError: There is no such index.
    """

    def __init__(self, dim: int, factory: str | None = None) -> None:
        self.dim = dim
        self._factory = factory
        form = form_for(0, factory)
        none = np.zeros((0, dim), np.float32), np.zeros(0, np.int64)
        self._state = _State(form.build(*none, dim), form, {}, {})
        # FAISS numbers by place, so its numbers move when one is removed; ours are used once.
        self._next_ids = itertools.count()
        # One lock per process: a child's copy of a held one would never be released.
        self._locks: dict[int, threading.Lock] = {}

    def __len__(self) -> int:
        """Chunks."""
        return len(self._state.ids)

    def __contains__(self, chunk_id: object) -> bool:
        return chunk_id in self._state.ids

    @property
    def num_vectors(self) -> int:
        """Vectors of all chunks."""
        return len(self._state.owners)

    @property
    def form(self) -> IndexForm:
        """Which FAISS index holds them now."""
        return self._state.form

    def chunk_ids(self) -> frozenset[ChunkId]:
        """Every chunk now."""
        return frozenset(self._state.ids)

    def vectors_of(self, chunk_id: ChunkId) -> Vectors | None:
        """A chunk's vectors, ``[windows, dim]`` of length 1; None for a chunk that is not there."""
        state = self._state
        ids = state.ids.get(chunk_id)
        return None if ids is None else np.stack([state.vectors.reconstruct(i) for i in ids])

    def add(self, vectors: Mapping[ChunkId, Vectors]) -> dict[ChunkId, str]:
        """As :meth:`update`, without a removal."""
        return self.update(vectors)

    def remove(self, chunk_ids: Iterable[ChunkId]) -> None:
        """As :meth:`update`, without an addition."""
        self.update({}, remove=chunk_ids)

    def update(
        self, add: Mapping[ChunkId, Vectors], *, remove: Iterable[ChunkId] = ()
    ) -> dict[ChunkId, str]:
        """Remove chunks and add others, as one step.

        Args:
            add: ``[windows, dim]`` each, at least one row, of any length above 0. A chunk that is
                there already loses its former vectors.
            remove: Chunks; those that are not there are passed over.

        Returns:
            The chunks that were not added, with the reason; what they had before is removed.

        Raises:
            InvalidValueError: An array has another shape; nothing was changed.
        """
        for rows in add.values():
            self._check_shape(rows)
        faults = {c: fault for c, rows in add.items() if (fault := vector_fault(rows))}
        with self._lock(), _one_thread():
            old = self._state
            vectors: Any = faiss.clone_index(old.vectors)
            ids, owners = dict(old.ids), dict(old.owners)
            gone = [i for c in {*remove, *add} for i in ids.pop(c, ())]
            for i in gone:
                del owners[i]
            if gone and old.form.is_exact:
                vectors.remove_ids(np.array(gone, dtype=np.int64))
            for chunk_id, rows in add.items():
                if chunk_id not in faults:
                    new = tuple(itertools.islice(self._next_ids, len(rows)))
                    vectors.add_with_ids(_unit(rows), np.array(new, dtype=np.int64))
                    ids[chunk_id] = new
                    owners.update(dict.fromkeys(new, chunk_id))
            self._state = self._settled(_State(vectors, old.form, ids, owners))
        return faults

    def search(
        self, queries: Vectors, k: int, among: Iterable[ChunkId] | None = None
    ) -> list[ScoredChunk]:
        """The nearest chunks, the best first; of equal ones, the smaller id.

        Args:
            queries: ``[n, dim]``; a chunk's score is its best one over all rows.
            k: At most so many chunks.
            among: Only these; None is all.

        Raises:
            InvalidValueError: ``k`` is not positive, or a query is not finite, is zero or has
                another width.
        """
        if k < 1:
            raise InvalidValueError(f"top_k is {k}, less than 1", param="top_k")
        self._check_shape(queries)
        if fault := vector_fault(queries):
            raise InvalidValueError(f"the query cannot be searched for: its {fault}", param="query")
        state = self._state
        wanted = None
        if among is not None:
            ids = [i for chunk_id in among for i in state.ids.get(chunk_id, ())]
            wanted = np.array(ids, dtype=np.int64)
        best: dict[ChunkId, float] = {}
        for row in _unit(queries):
            for chunk_id, score in _nearest(state, row[None], k, wanted).items():
                best[chunk_id] = max(score, best.get(chunk_id, -1.0))
        ranked = sorted(best.items(), key=lambda item: (-item[1], item[0]))
        return [ScoredChunk(chunk_id, score) for chunk_id, score in ranked[:k]]

    def _settled(self, state: _State) -> _State:
        """The state in the form that its size wants, and without too many vectors of nobody."""
        form = form_for(len(state.owners), self._factory)
        if form == state.form and state.num_dead * _MAX_DEAD_PART <= len(state.owners):
            return state
        live = np.fromiter(state.owners, np.int64, len(state.owners))
        rows = np.zeros((0, self.dim), np.float32)
        if len(live):
            rows = np.stack([state.vectors.reconstruct(int(i)) for i in live])
        return _State(form.build(rows, live, self.dim), form, state.ids, state.owners)

    def _check_shape(self, rows: Vectors) -> None:
        if rows.ndim != 2 or not len(rows) or rows.shape[1] != self.dim:
            raise InvalidValueError(
                f"an array of {list(rows.shape)}, where the index has {self.dim} numbers per vector"
            )

    def _lock(self) -> threading.Lock:
        return self._locks.setdefault(os.getpid(), threading.Lock())


def vector_fault(rows: Vectors) -> str | None:
    """Why vectors cannot be indexed, if they cannot.

    Args:
        rows: ``[n, dim]``.
    """
    if not np.isfinite(rows).all():
        return "embedding is not finite"
    if not rows.any(axis=1).all():
        return "embedding is zero"
    return None


def _unit(rows: Vectors) -> Vectors:
    """Rows of length 1; in fp64, where no square of an fp32 number overflows."""
    wide = rows.astype(np.float64)
    return (wide / np.linalg.norm(wide, axis=1, keepdims=True)).astype(np.float32)


def _nearest(
    state: _State, row: Vectors, k: int, wanted: npt.NDArray[np.int64] | None
) -> dict[ChunkId, float]:
    """At least the ``k`` nearest chunks of one query, with all that tie with the last of them.

    Args:
        state: The index.
        row: ``[1, dim]``. One row at a time: more would go to BLAS, and its threads.
        k: Chunks wanted.
        wanted: Numbers of the only vectors that count; None is all.
    """
    total = state.vectors.ntotal if wanted is None else len(wanted)
    if wanted is not None and not state.form.is_exact and total <= MAX_COMPARED:
        return _compared(state, row[0], wanted)
    # The library adds the parameter when it is imported, which no type checker sees.
    selector = None if wanted is None else cast(Any, faiss.IDSelectorBatch)(wanted)
    num_asked = min(total, k + 1 + min(state.num_dead, k))
    while num_asked:
        with _one_thread():
            parameters = state.form.parameters(num_asked, selector)
            scores, ids = state.vectors.search(row, num_asked, params=parameters)
        best: dict[ChunkId, float] = {}
        for score, i in zip(scores[0].tolist(), ids[0].tolist(), strict=True):
            if i in state.owners:
                best.setdefault(state.owners[i], min(max(score, -1.0), 1.0))
        if num_asked == total:
            return best
        # Vectors come in descending order, so chunks do too; of an inexact form, ties may be missed.
        if len(best) >= k and (
            not state.form.is_exact or list(best.values())[k - 1] > scores[0, -1]
        ):
            return best
        num_asked = min(total, 2 * num_asked)
    return {}


def _compared(
    state: _State, row: npt.NDArray[np.float32], wanted: npt.NDArray[np.int64]
) -> dict[ChunkId, float]:
    """Chunks by their best vector among few, each compared."""
    best: dict[ChunkId, float] = {}
    for i in wanted.tolist():
        # Not BLAS, and its threads.
        score = float(np.einsum("d,d->", state.vectors.reconstruct(i), row))
        owner = state.owners[i]
        best[owner] = max(min(max(score, -1.0), 1.0), best.get(owner, -1.0))
    return best


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep FAISS to the calling thread; the setting is the thread's own and is put back."""
    num_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(num_threads)
