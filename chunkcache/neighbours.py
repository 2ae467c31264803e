"""Neighbours: which chunks a chunk is prefilled behind, chosen once and recorded.

The choice is made by a finder that the caller brings; what is kept of it, and that it never
changes by itself, is decided here. Runs no model.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Protocol

from chunkcache.catalog_values import Neighbour
from chunkcache.documents import Chunk, Document
from chunkcache.errors import InvalidValueError
from chunkcache.identity import ChunkId
from chunkcache.ingest import DocumentIngest

_DOCUMENTS_KEPT = 32


class NeighbourFinder(Protocol):
    """Ranks a tenant's chunks by how near they are to one of them.

    Safe to use from several threads. A ranking is a function of the chunks that are stored.
    """

    def nearest(self, chunk_id: ChunkId) -> Iterable[ChunkId]:
        """Chunks of the same tenant, the nearest first, read only as far as they are needed.

        The chunk itself may be among them, and chunks that are gone.
        """
        ...


class NeighbourRecorder:
    """Chooses neighbours for chunks of which none are recorded, and records them.

    They are recorded, so that an entry computed again has the same bits, however the corpus has
    grown since; only when one of them is gone are others chosen.

    Args:
        ingest: Where the documents are, and what they are prepared with.
        finder: Ranks chunks; it is asked for the tenant's own chunks alone.

    Raises:
        InvalidValueError: The preparation has no neighbours.
    """

    def __init__(self, ingest: DocumentIngest, finder: NeighbourFinder) -> None:
        preparation = ingest.runtime.preparation
        if preparation.kind != "neighbours":
            raise InvalidValueError(f"preparation {preparation} has no neighbours")
        self._num_neighbours = preparation.num_neighbours
        self._preparation = str(preparation)
        self._ingest = ingest
        self._finder = finder
        self._joint_tokens = len(ingest.runtime.model.template.joint)
        self._places = {c: (name, index) for c, name, index in ingest.catalog.chunks()}
        self._document = lru_cache(_DOCUMENTS_KEPT)(ingest.catalog.get)

    @property
    def num_chunks(self) -> int:
        """Distinct chunks that the tenant had when this was made."""
        return len(self._places)

    def record(self, document: Document) -> None:
        """Choose and record neighbours for those chunks of a document that have none."""
        catalog = self._ingest.catalog
        chunks = {c.chunk_id: c for c in document.chunks}
        recorded = catalog.get_neighbours(self._preparation, chunks)
        within = document.collections
        chosen = {
            c: self._choose(chunk, within) for c, chunk in chunks.items() if c not in recorded
        }
        found = {chunk_id: neighbours for chunk_id, neighbours in chosen.items() if neighbours}
        if found:
            catalog.put_neighbours(self._preparation, found)

    def _choose(self, chunk: Chunk, within: tuple[str, ...]) -> tuple[Neighbour, ...]:
        """The nearest chunks of documents in the same collections that fit in front of a chunk.

        The nearest is the last.
        """
        room = self._ingest.names.room_for_neighbours(chunk.token_ids, self._ingest.system_ids)
        chosen: dict[ChunkId, Neighbour] = {}
        for chunk_id in self._finder.nearest(chunk.chunk_id):
            token_ids = None if chunk_id == chunk.chunk_id else self._token_ids(chunk_id, within)
            if token_ids is None or len(token_ids) + self._joint_tokens > room:
                continue
            if chunk_id not in chosen:
                chosen[chunk_id] = Neighbour(chunk_id, token_ids)
                room -= len(token_ids) + self._joint_tokens
            if len(chosen) == self._num_neighbours:
                break
        return tuple(reversed(chosen.values()))

    def _token_ids(self, chunk_id: ChunkId, within: tuple[str, ...]) -> tuple[int, ...] | None:
        """A chunk's tokens; None for one that is gone, elsewhere, or of another tokenizer."""
        name, index = self._places.get(chunk_id, ("", 0))
        document = self._document(name) if name else None
        if document is None or set(document.collections) != set(within):
            return None
        if document.tokenizer != self._ingest.runtime.model.tokenizer.digest:
            return None
        chunks = document.chunks[index : index + 1]
        return chunks[0].token_ids if chunks and chunks[0].chunk_id == chunk_id else None
