"""What the API asks of a retriever; it makes none."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from chunkcache.chunk_cache import ChunkCache
from chunkcache.planning import DocumentRef
from chunkcache_retriever.metadata_filter import MetadataFilter
from chunkcache_retriever.retriever import ChunkHit


class Retriever(Protocol):
    """Finds the passages of a tenant's documents that bear on a question.

    Called on worker threads.
    """

    def search(
        self,
        query: str,
        top_k: int,
        filters: MetadataFilter | None = None,
        among: Collection[str] | None = None,
    ) -> Sequence[ChunkHit]:
        """The best ``top_k`` passages of documents whose metadata match, the best first.

        Where ``among`` is given, of those documents alone.
        """
        ...

    def retrieve(
        self, query: str, top_k: int, filters: MetadataFilter | None = None
    ) -> Sequence[DocumentRef]:
        """The same, as references in prompt order."""
        ...


RetrieverFactory = Callable[[ChunkCache], Retriever]
