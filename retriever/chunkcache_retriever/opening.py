"""The retriever that the settings name: embedder, index and reranker."""

from typing import TYPE_CHECKING

from chunkcache.errors import InvalidValueError
from chunkcache.settings import Settings
from chunkcache_retriever.catalog_index import OnEmbedded
from chunkcache_retriever.embedder import Embedder
from chunkcache_retriever.rerank.reranker import Reranker
from chunkcache_retriever.retriever import Retriever

if TYPE_CHECKING:
    from chunkcache.chunk_cache import ChunkCache

DEMO = "demo"
OWN_MODEL = "model"


def is_url(text: str) -> bool:
    """Whether a setting names a service."""
    return text.startswith(("http://", "https://"))


def open_embedder(settings: Settings) -> Embedder:
    """The embedder; loading one takes seconds.

    Raises:
        ModelFilesError: It is not installed, or cannot be read.
        UnsupportedModelError: It does not say where its tokens lie.
        ServerUnreachableError: Its service cannot be reached.
        RemoteServerError: Its service does not embed.
        InvalidValueError: A service's model is not named.
    """
    name = settings.embedder
    if name == DEMO:
        from chunkcache_retriever.minilm import MiniLmEmbedder

        return MiniLmEmbedder()
    if is_url(name):
        from chunkcache_retriever.remote_embedder import RemoteEmbedder

        model = _named(settings.embedder_model, "embedder_model")
        return RemoteEmbedder(name, model, max_tokens=settings.embedder_max_tokens)
    from chunkcache_retriever.sentence_embedder import SentenceTransformerEmbedder

    return SentenceTransformerEmbedder(name)


class RetrieverParts:
    """What the retrievers of all tenants share, loaded once: that takes seconds.

    Args:
        settings: Of the runtime that they search in.

    Raises:
        ChunkCacheError: As for :func:`open_embedder`; likewise for the reranker.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._embedder = open_embedder(settings)
        self._reranker = _shared_reranker(settings)

    def retriever(
        self,
        cache: "ChunkCache",
        on_embedded: OnEmbedded = lambda num_done, num_chunks: None,
    ) -> Retriever:
        """A retriever over one tenant's documents.

        Raises:
            UnsupportedModelError: The served model is to score passages, and cannot.
        """
        reranker = self._reranker
        if self._settings.reranker == OWN_MODEL:
            from chunkcache_retriever.rerank.kv_reranker import KvReranker

            reranker = KvReranker(cache)
        return Retriever(
            cache,
            self._embedder,
            on_embedded=on_embedded,
            index_factory=self._settings.index_factory,
            reranker=reranker,
            rerank_depth=self._settings.rerank_depth,
        )


def _shared_reranker(settings: Settings) -> Reranker | None:
    """The reranker, if one is set that knows nothing of tenants."""
    name = settings.reranker
    if name is None or name == OWN_MODEL:
        return None
    if is_url(name):
        from chunkcache_retriever.rerank.remote_reranker import RemoteReranker

        return RemoteReranker(name, _named(settings.reranker_model, "reranker_model"))
    from chunkcache_retriever.rerank.cross_encoder import CrossEncoderReranker

    return CrossEncoderReranker(name)


def _named(model: str | None, setting: str) -> str:
    if model is None:
        raise InvalidValueError(f"a service needs the setting {setting}", param=setting)
    return model
