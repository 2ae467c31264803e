"""What the API asks of a retriever; it knows none."""

from collections.abc import Callable, Sequence
from typing import Protocol

from chunkcache.chunk_cache import ChunkCache
from chunkcache.planning import DocumentRef


class Retriever(Protocol):
    """Finds the passages of a tenant's documents that bear on a question."""

    def retrieve(self, query: str, top_k: int) -> Sequence[DocumentRef]:
        """The best ``top_k`` passages, as references in prompt order; called on worker threads."""
        ...


RetrieverFactory = Callable[[ChunkCache], Retriever]
