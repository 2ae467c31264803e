"""The retriever that the command line uses: the demo embedder over the store's documents."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chunkcache.chunk_cache import ChunkCache
    from chunkcache_retriever.retriever import Retriever


def make_retriever(cache: "ChunkCache") -> "Retriever":
    """Load the embedder; takes seconds.

    Raises:
        ModelFilesError: It is not installed.
    """
    from chunkcache_retriever.minilm import MiniLmEmbedder
    from chunkcache_retriever.retriever import Retriever

    return Retriever(cache, MiniLmEmbedder())


def why_no_retriever() -> str | None:
    """Why :func:`make_retriever` cannot work here, or None. Loads nothing."""
    from chunkcache.errors import ModelFilesError
    from chunkcache_retriever.minilm import minilm_dir

    try:
        minilm_dir()
    except ModelFilesError as error:
        return error.message
    return None
