"""Finders of neighbours: by meaning, by shared tokens, and at random as a control.

Each ranks all chunks of one tenant's catalog. A finder never sees another tenant's catalog; once
there are collections, it must not see another collection either.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from chunkcache.catalog import Catalog
from chunkcache.identity import ChunkId, encode_token_ids
from chunkcache_retriever.catalog_index import CatalogIndex, OnEmbedded
from chunkcache_retriever.embedder import Embedder

_FIRST_RANKS = 16

ValueT = TypeVar("ValueT")


class EmbeddingNeighbours:
    """Nearest by the angle between embeddings, as FusionRAG (arXiv:2601.12904) finds them.

    Args:
        catalog: The tenant's documents.
        embedder: Embeds chunks that have no vector in the store yet, at the first call.
        on_embedded: Told how far that is.
    """

    def __init__(
        self,
        catalog: Catalog,
        embedder: Embedder,
        on_embedded: OnEmbedded = lambda num_done, num_chunks: None,
    ) -> None:
        self._index = CatalogIndex(catalog, embedder, on_embedded)

    def nearest(self, chunk_id: ChunkId) -> Iterator[ChunkId]:
        """Chunks by meaning, the nearest first; none for a chunk without text to embed.

        Raises:
            ModelError: The embedder does not do what it says.
            StoreError: The store cannot be read.
        """
        self._index.sync()
        index = self._index.index
        vectors = index.vectors_of(chunk_id)
        if vectors is None:
            return
        num_given, num_asked = 0, _FIRST_RANKS
        while True:
            found = index.search(vectors, num_asked)
            yield from (scored.chunk_id for scored in found[num_given:])
            if len(found) < num_asked:
                return
            num_given, num_asked = num_asked, 4 * num_asked


class OverlapNeighbours:
    """Nearest by the share of tokens in common (weighted Jaccard index, rare tokens count more).

    Args:
        catalog: The tenant's documents.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._table = _Derived(catalog, _token_table)

    def nearest(self, chunk_id: ChunkId) -> Iterator[ChunkId]:
        """Chunks by shared tokens, the nearest first; equal ones in the order of their tokens."""
        table = self._table.current()
        number = table.numbers.get(chunk_id)
        if number is None:
            return
        shared = np.zeros(len(table.chunk_ids))
        for token in sorted(table.tokens[number]):
            shared[table.holders[token]] += table.weights[token]
        scores = shared / (table.sizes + table.sizes[number] - shared)
        for other in np.argsort(-scores, kind="stable"):
            yield table.chunk_ids[other]


class RandomNeighbours:
    """Any chunks: a control for how much it matters that neighbours are near.

    The order for one chunk depends on the seed and on what stands in the chunks: neither on which
    other ones there are, nor on the store.

    Args:
        catalog: The tenant's documents.
        seed: Another seed, another order.
    """

    def __init__(self, catalog: Catalog, seed: int = 0) -> None:
        self._digests = _Derived(catalog, _content_digests)
        self._seed = seed

    def nearest(self, chunk_id: ChunkId) -> Iterator[ChunkId]:
        """All chunks, in a random order of this chunk's own."""
        digests = self._digests.current()
        if chunk_id not in digests:
            return
        seed = self._seed.to_bytes(8, "little", signed=True)
        key = blake3(seed + digests[chunk_id]).digest()
        yield from sorted(digests, key=lambda other: blake3(digests[other], key=key).digest())


class _Derived(Generic[ValueT]):
    """Something made of a catalog's chunks, made anew when they have changed.

    Args:
        catalog: The tenant's documents.
        make: Makes it from the token ids of each chunk.
    """

    def __init__(
        self, catalog: Catalog, make: Callable[[Mapping[ChunkId, tuple[int, ...]]], ValueT]
    ) -> None:
        self._catalog = catalog
        self._make = make
        self._lock = threading.Lock()
        self._made: tuple[int, ValueT] | None = None

    def current(self) -> ValueT:
        with self._lock:
            # Read before the chunks are, so that a change meanwhile leaves a difference.
            generation = self._catalog.generation()
            if self._made is None or self._made[0] != generation:
                self._made = generation, self._make(_chunk_tokens(self._catalog))
            return self._made[1]


def _chunk_tokens(catalog: Catalog) -> dict[ChunkId, tuple[int, ...]]:
    found: dict[ChunkId, tuple[int, ...]] = {}
    for name in dict.fromkeys(document_id for _, document_id, _ in catalog.chunks()):
        document = catalog.get(name)
        found |= {c.chunk_id: c.token_ids for c in (document.chunks if document else ())}
    return found


def _content_digests(chunks: Mapping[ChunkId, tuple[int, ...]]) -> dict[ChunkId, bytes]:
    return {c: blake3(encode_token_ids(token_ids)).digest() for c, token_ids in chunks.items()}


@dataclass(frozen=True)
class _TokenTable:
    """Which tokens stand in which chunks.

    Attributes:
        chunk_ids: In the order of the chunks' tokens; a chunk's number is its place here.
        numbers: The numbers of chunks.
        tokens: Per chunk its distinct tokens.
        holders: Per token the numbers of the chunks that hold it.
        weights: Per token how much it counts: the rarer, the more.
        sizes: ``[chunks]``: the sum of each chunk's weights.
    """

    chunk_ids: list[ChunkId]
    numbers: Mapping[ChunkId, int]
    tokens: list[frozenset[int]]
    holders: Mapping[int, npt.NDArray[np.int64]]
    weights: Mapping[int, float]
    sizes: npt.NDArray[np.float64]


def _token_table(chunks: Mapping[ChunkId, tuple[int, ...]]) -> _TokenTable:
    chunk_ids = sorted(chunks, key=lambda c: chunks[c])
    tokens = [frozenset(chunks[chunk_id]) for chunk_id in chunk_ids]
    holders: dict[int, list[int]] = {}
    for number, held in enumerate(tokens):
        for token in held:
            holders.setdefault(token, []).append(number)
    weights = {t: float(np.log((1 + len(tokens)) / len(held))) for t, held in holders.items()}
    return _TokenTable(
        chunk_ids=chunk_ids,
        numbers={chunk_id: number for number, chunk_id in enumerate(chunk_ids)},
        tokens=tokens,
        holders={t: np.array(held, dtype=np.int64) for t, held in holders.items()},
        weights=weights,
        sizes=np.array([sum(weights[t] for t in sorted(held)) for held in tokens]),
    )
