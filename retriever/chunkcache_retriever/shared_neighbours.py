"""Neighbours that many chunks share: a corpus falls into groups, and a group has central chunks.

Every chunk of a group is prepared behind the same chunks, so that these run once for all of them
and preparing costs little more than behind a fixed text.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chunkcache.catalog import Catalog
from chunkcache.identity import ChunkId
from chunkcache_retriever.catalog_index import CatalogIndex, OnEmbedded
from chunkcache_retriever.embedder import Embedder, Vectors

_ROUNDS = 12
_CENTRAL_CHUNKS = 16
"""Chunks of a group that are ranked by how central they are: a reader may have to skip some."""


class SharedNeighbours:
    """Central chunks of the groups that a chunk is nearest to (spherical k-means).

    Args:
        catalog: The tenant's documents.
        embedder: Embeds chunks that have no vector in the store yet, at the first call.
        chunks_per_group: Chunks of a group on average.
        on_embedded: Told how far embedding is.
    """

    def __init__(
        self,
        catalog: Catalog,
        embedder: Embedder,
        chunks_per_group: int = 24,
        on_embedded: OnEmbedded = lambda num_done, num_chunks: None,
    ) -> None:
        self._index = CatalogIndex(catalog, embedder, on_embedded)
        self._chunks_per_group = chunks_per_group
        self._lock = threading.Lock()
        self._groups: tuple[int, _Groups] | None = None

    def nearest(self, chunk_id: ChunkId) -> Iterator[ChunkId]:
        """Central chunks, of the nearest group first; none for a chunk without text to embed.

        Raises:
            ModelError: The embedder does not do what it says.
            StoreError: The store cannot be read.
        """
        groups = self._current()
        vectors = self._index.index.vectors_of(chunk_id)
        if vectors is None:
            return
        scores = groups.centres @ _direction(vectors)
        for group in np.argsort(-scores, kind="stable"):
            yield from groups.central[group]

    def _current(self) -> "_Groups":
        with self._lock:
            generation = self._index.sync().report.generation
            if self._groups is None or self._groups[0] != generation:
                index = self._index.index
                found = {c: index.vectors_of(c) for c in index.chunk_ids()}
                directions = {c: _direction(v) for c, v in found.items() if v is not None}
                self._groups = generation, _group(directions, self._chunks_per_group)
            return self._groups[1]


@dataclass(frozen=True)
class _Groups:
    """Groups of chunks.

    Attributes:
        centres: ``[groups, dim]`` of length 1.
        central: Per group, its chunks nearest to the centre, the nearest first.
    """

    centres: Vectors
    central: tuple[tuple[ChunkId, ...], ...]


def _direction(vectors: Vectors) -> npt.NDArray[np.float32]:
    """One vector of length 1 for a chunk's ``[windows, dim]``."""
    total = vectors.sum(axis=0)
    return total / max(float(np.linalg.norm(total)), 1e-12)


def _group(directions: dict[ChunkId, npt.NDArray[np.float32]], chunks_per_group: int) -> _Groups:
    # In an order of what the chunks say, so that their ids do not decide.
    ids = sorted(directions, key=lambda c: (directions[c].tobytes(), c))
    if not ids:
        return _Groups(np.zeros((0, 1), dtype=np.float32), ())
    rows = np.stack([directions[c] for c in ids])
    centres = rows[_spread(rows, max(1, round(len(ids) / chunks_per_group)))]
    for _ in range(_ROUNDS):
        owners = np.argmax(rows @ centres.T, axis=1)
        sums = np.zeros_like(centres)
        np.add.at(sums, owners, rows)
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        centres = np.where(lengths > 0, sums / np.maximum(lengths, 1e-12), centres)
    scores = rows @ centres.T
    owners = np.argmax(scores, axis=1)
    central: list[tuple[ChunkId, ...]] = []
    for group in range(len(centres)):
        members = np.flatnonzero(owners == group)
        ranked = members[np.argsort(-scores[members, group], kind="stable")]
        central.append(tuple(ids[i] for i in ranked[:_CENTRAL_CHUNKS]))
    return _Groups(centres, tuple(central))


def _spread(rows: Vectors, num: int) -> list[int]:
    """Rows to begin with, drawn far from one another (k-means++), always the same ones."""
    generator = np.random.default_rng(0)
    chosen = [int(generator.integers(len(rows)))]
    nearest = rows @ rows[chosen[0]]
    while len(chosen) < num:
        distances = np.maximum(1.0 - nearest.astype(np.float64), 0.0)
        total = distances.sum()
        if total <= 0:
            break
        chosen.append(int(generator.choice(len(rows), p=distances / total)))
        nearest = np.maximum(nearest, rows @ rows[chosen[-1]])
    return chosen
