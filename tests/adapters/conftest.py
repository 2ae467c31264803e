"""What the adapters' tests share: one store, asked in this process and through a server."""

from collections.abc import Iterator

import pytest

from chunkcache.chunk_cache import ChunkCache
from chunkcache_api.app import create_app
from chunkcache_retriever.adapters.client import CacheClient
from chunkcache_retriever.adapters.local_client import LocalClient
from chunkcache_retriever.adapters.remote_client import RemoteClient
from chunkcache_retriever.retriever import Retriever
from chunkcache_retriever.testing import FixedEmbedder


@pytest.fixture
def cache(open_cache) -> ChunkCache:
    """An open, empty cache."""
    return open_cache(pool_tokens=8192)


@pytest.fixture
def local(cache: ChunkCache) -> LocalClient:
    """The cache, in this process."""
    return LocalClient(cache, Retriever(cache, FixedEmbedder()))


@pytest.fixture
def remote(cache: ChunkCache, serve) -> Iterator[RemoteClient]:
    """The same cache, through a server."""
    app = create_app(cache.runtime, retriever_factory=lambda c: Retriever(c, FixedEmbedder()))
    with serve(app) as http, RemoteClient(str(http.base_url)) as client:
        yield client


@pytest.fixture(params=["local", "remote"])
def client(request: pytest.FixtureRequest) -> CacheClient:
    """Both, one after the other."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def stocked(client: CacheClient, passages: dict[str, str]) -> CacheClient:
    """A client with the short texts stored, with metadata."""
    for number, (name, text) in enumerate(passages.items()):
        client.put(name, text, {"number": number})
    return client
