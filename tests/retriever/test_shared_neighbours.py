"""Neighbours that a group of chunks shares: the same ones for all of it, its central ones."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from chunkcache.identity import ChunkId, TenantNamespace
from chunkcache_retriever.shared_neighbours import SharedNeighbours
from chunkcache_retriever.testing import FixedEmbedder

TOPICS = ("the ferry leaves the pier", "granite is an igneous rock", "a baker keeps the tower key")
GROUP = 8


def _put(shelf: Any) -> dict[ChunkId, int]:
    """Chunks of three topics, with the topic's number."""
    return {
        shelf.put(f"d{t}-{i}", f"{topic} {topic}, note {i}").chunks[0].chunk_id: t
        for t, topic in enumerate(TOPICS)
        for i in range(GROUP)
    }


def _finder(shelf: Any) -> SharedNeighbours:
    return SharedNeighbours(shelf.catalog, FixedEmbedder(), chunks_per_group=GROUP)


def test_chunks_of_one_topic_share_their_neighbours(shelf: Any) -> None:
    topics = _put(shelf)
    finder = _finder(shelf)
    shared = {c: tuple(islice(finder.nearest(c), 2)) for c in topics}
    assert len(set(shared.values())) == len(TOPICS)
    for chunk_id, central in shared.items():
        assert {topics[c] for c in central} == {topics[chunk_id]}


def test_every_chunk_is_ranked_once_and_rankings_are_steady(shelf: Any) -> None:
    topics = _put(shelf)
    chunk_id = next(iter(topics))
    ranked = list(_finder(shelf).nearest(chunk_id))
    assert sorted(ranked) == sorted(topics)
    assert list(_finder(shelf).nearest(chunk_id)) == ranked
    assert list(_finder(shelf).nearest(ChunkId(b"x" * 32))) == []


def test_rankings_are_alike_in_any_store(shelf: Any, open_shelf: Callable[..., Any]) -> None:
    """Chunk ids differ from store to store; what is compared across stores must not."""
    others = open_shelf(TenantNamespace(b"o" * 32))
    ranked = []
    for each in (shelf, others):
        ids = list(_put(each))
        ranked.append([ids.index(c) for c in _finder(each).nearest(ids[3])])
    assert ranked[0] == ranked[1]


def test_what_is_deleted_is_not_ranked(shelf: Any) -> None:
    topics = _put(shelf)
    finder = _finder(shelf)
    first = next(iter(topics))
    central = next(iter(finder.nearest(first)))
    name = next(d for c, d, _ in shelf.catalog.chunks() if c == central)
    shelf.delete(name)
    assert central not in list(finder.nearest(next(c for c in topics if c != central)))


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_small_and_uniform_corpora(shelf: Any, num_chunks: int) -> None:
    ids = [shelf.put(f"d{i}", TOPICS[0] + " " * i).chunks[0].chunk_id for i in range(num_chunks)]
    finder = SharedNeighbours(shelf.catalog, FixedEmbedder(), chunks_per_group=1)
    assert set(finder.nearest(ids[0])) == set(ids)
