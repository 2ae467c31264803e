"""What the command line searches with: the settings' embedder over the store's documents."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chunkcache.chunk_cache import ChunkCache
    from chunkcache.neighbours import NeighbourFinder
    from chunkcache.settings import Settings
    from chunkcache_retriever.opening import RetrieverParts
    from chunkcache_retriever.retriever import Retriever


class RetrieverFactory:
    """Makes retrievers that share their models, which are loaded with the first of them."""

    def __init__(self) -> None:
        self._parts: RetrieverParts | None = None

    def __call__(self, cache: "ChunkCache") -> "Retriever":
        """A retriever over a cache; the first takes seconds.

        Raises:
            ChunkCacheError: The embedder or the reranker cannot be used.
        """
        from chunkcache_retriever.opening import RetrieverParts

        if self._parts is None:
            self._parts = RetrieverParts(cache.runtime.settings)
        return self._parts.retriever(cache)


def make_neighbours(
    cache: "ChunkCache", progress: Callable[[str], None]
) -> "NeighbourFinder | None":
    """What finds neighbours where the cache's preparation has some; else None, and nothing loads.

    Args:
        cache: Whose documents are searched.
        progress: Told in lines how far the embedding of new chunks is.

    Raises:
        ModelFilesError: The embedder is not installed.
    """
    if cache.runtime.preparation.kind != "neighbours":
        return None
    from chunkcache_retriever.neighbours import EmbeddingNeighbours
    from chunkcache_retriever.opening import open_embedder

    def tell(num_done: int, num_chunks: int) -> None:
        progress(f"embedded {num_done:,} of {num_chunks:,} chunks, to find their neighbours")

    return EmbeddingNeighbours(cache.catalog, open_embedder(cache.runtime.settings), tell)


def why_no_retriever(settings: "Settings") -> str | None:
    """Why :class:`RetrieverFactory` cannot work here, or None. Loads nothing."""
    from chunkcache.errors import ModelFilesError
    from chunkcache_retriever.minilm import minilm_dir

    if settings.embedder != "demo":
        return None
    try:
        minilm_dir()
    except ModelFilesError as error:
        return error.message
    return None
