"""Neighbours are of documents in the same sets: an entry holds a trace of what it stands behind."""

from collections.abc import Callable, Iterator
from typing import Any

from chunkcache import ChunkCache
from chunkcache.identity import ChunkId

TEXTS = {
    "a": "The key to the tower is kept by the baker.",
    "b": "The door of the tower opens at dusk.",
    "c": "The baker sells bread from seven in the morning.",
    "d": "The ferry leaves from the northern pier.",
}


class Anything:
    """Finds every chunk of the tenant, in a fixed order."""

    def __init__(self, cache: ChunkCache) -> None:
        self._cache = cache

    def nearest(self, chunk_id: ChunkId) -> Iterator[ChunkId]:
        yield from sorted(c for c, _, _ in self._cache.catalog.chunks())


def test_neighbours_are_of_documents_in_the_same_sets(
    open_cache: Callable[..., ChunkCache], model_dir: Callable[..., Any]
) -> None:
    preparation = "neighbours(2)"
    model = model_dir(max_position_embeddings=2048)
    cache = open_cache(model=model, preparation=preparation)
    for name, text in TEXTS.items():
        cache.put(name, text)
    cache.catalog.collections.create("one", document_ids=["a", "c"])
    cache.precache(neighbours=Anything(cache))
    ids = {name: cache.get(name).chunks[0].chunk_id for name in TEXTS}
    found = cache.catalog.get_neighbours(preparation, ids.values())
    behind = {name: [n.chunk_id for n in found[i]] for name, i in ids.items()}
    assert behind == {"a": [ids["c"]], "b": [ids["d"]], "c": [ids["a"]], "d": [ids["b"]]}
