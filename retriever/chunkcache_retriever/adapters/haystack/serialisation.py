"""Clients in Haystack's serialised pipelines: a server's address, and never a key."""

from typing import Any

from chunkcache.errors import InvalidValueError
from chunkcache_retriever.adapters.client import CacheClient
from chunkcache_retriever.adapters.remote_client import RemoteClient


def client_to_dict(client: CacheClient) -> dict[str, Any]:
    """A client as it stands in a serialised pipeline.

    Raises:
        InvalidValueError: It is of this process, and so no file can name it.
    """
    if not isinstance(client, RemoteClient):
        raise InvalidValueError(
            "a cache of this process cannot be serialised; serve it, and use a RemoteClient",
            param="client",
        )
    return {"base_url": client.base_url}


def client_from_dict(data: Any) -> CacheClient:
    """The client that :func:`client_to_dict` wrote; its key comes from ``CHUNKCACHE_API_KEY``.

    Raises:
        InvalidValueError: It is something else.
    """
    if not isinstance(data, dict) or not isinstance(data.get("base_url"), str):
        raise InvalidValueError("client has no base_url", param="client")
    return RemoteClient(data["base_url"])
