"""Case tests, F17: what an adapter adds, it can delete by the id that it gave.

The adapters of frameworks do so over the client that is tried here; each one's own way to it is tried
where the framework is installed (tests/adapters).
"""

from collections.abc import Callable
from typing import Any

import pytest

from chunkcache.errors import DocumentNotFoundError
from chunkcache_retriever.adapters.client import ChatOptions, ContextPart, Turn
from chunkcache_retriever.adapters.local_client import LocalClient
from chunkcache_retriever.adapters.passages import context_of, place_metadata, place_of
from chunkcache_retriever.retriever import Retriever
from chunkcache_retriever.testing import FixedEmbedder

Caches = Callable[..., Any]


def test_F17_ids_that_a_search_gives_are_ids_to_delete(open_cache: Caches) -> None:
    cache = open_cache()
    client = LocalClient(cache, Retriever(cache, FixedEmbedder()))
    client.put("a/b#1", "The zebra lives here. " * 12)
    client.put("other", "The whale lives here.")
    (hit, *_) = client.search("The zebra", 1)
    place = place_of(place_metadata(hit))
    assert place is not None
    reply = client.chat([Turn("Who?", context_of([place]))], ChatOptions(max_tokens=1))
    assert [d["id"] for d in reply.reuse["documents"]] == ["a/b#1"]
    assert client.delete(place.document_id)
    assert [h.document_id for h in client.search("The zebra", 9)] == ["other"]
    with pytest.raises(DocumentNotFoundError):
        client.chat([Turn("Who?", (ContextPart("a/b#1"),))], ChatOptions(max_tokens=1))


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"chunkcache": None},
        {"chunkcache": {"document_id": "a"}},
        {"chunkcache": {"document_id": 1, "chunk_index": 0}},
        {"chunkcache": {"document_id": "a", "chunk_index": True}},
    ],
)
def test_F17_metadata_that_name_no_place(metadata: dict[str, Any]) -> None:
    assert place_of(metadata) is None
