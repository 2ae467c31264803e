"""Finders: what they rank first, that they rank everything once, and that rankings are steady."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from chunkcache.catalog import Catalog
from chunkcache.identity import ChunkId, TenantNamespace
from chunkcache.store.environment import StoreEnvironment
from chunkcache_retriever.neighbours import (
    EmbeddingNeighbours,
    OverlapNeighbours,
    RandomNeighbours,
)
from chunkcache_retriever.testing import FixedEmbedder

PASSAGES = (
    "the ferry leaves the northern pier at nine",
    "the ferry to the island leaves the pier at ten",
    "a baker keeps the key of the tower",
    "the key of the tower hangs at the baker's door",
    "granite is an igneous rock",
)
FINDERS: dict[str, Callable[[Catalog], Any]] = {
    "embedding": lambda catalog: EmbeddingNeighbours(catalog, FixedEmbedder()),
    "overlap": OverlapNeighbours,
    "random": RandomNeighbours,
}


def _put(shelf: Any) -> list[ChunkId]:
    return [shelf.put(f"d{i}", text).chunks[0].chunk_id for i, text in enumerate(PASSAGES)]


@pytest.mark.parametrize("name", FINDERS)
def test_every_chunk_is_ranked_once(shelf: Any, name: str) -> None:
    ids = _put(shelf)
    for i in range(40):
        ids.append(shelf.put(f"more{i}", f"line {i} says {i * i} and {i % 7}").chunks[0].chunk_id)
    finder = FINDERS[name](shelf.catalog)
    for chunk_id in ids[:3]:
        ranked = list(finder.nearest(chunk_id))
        assert sorted(ranked) == sorted(ids)
        assert list(finder.nearest(chunk_id)) == ranked
        if name != "random":
            assert ranked[0] == chunk_id
    assert list(finder.nearest(ChunkId(b"x" * 32))) == []


@pytest.mark.parametrize("name", ["embedding", "overlap"])
def test_the_nearest_is_about_the_same(shelf: Any, name: str) -> None:
    ids = _put(shelf)
    finder = FINDERS[name](shelf.catalog)
    for one, other in ((0, 1), (1, 0), (2, 3), (3, 2)):
        assert list(islice(finder.nearest(ids[one]), 2)) == [ids[one], ids[other]]


@pytest.mark.parametrize("name", FINDERS)
def test_what_is_deleted_or_another_tenants_is_not_ranked(
    shelf: Any, open_shelf: Callable[..., Any], name: str
) -> None:
    ids = _put(shelf)
    others = open_shelf(TenantNamespace(b"o" * 32))
    theirs = others.put("d", PASSAGES[0]).chunks[0].chunk_id
    finder = FINDERS[name](shelf.catalog)
    assert theirs not in list(finder.nearest(ids[0]))
    assert list(finder.nearest(theirs)) == []
    shelf.delete("d1")
    assert sorted(finder.nearest(ids[0])) == sorted({*ids} - {ids[1]})


@pytest.mark.parametrize("name", ["overlap", "random"])
def test_controls_rank_alike_in_any_store(shelf: Any, tmp_path: Path, name: str) -> None:
    """Chunk ids differ from store to store; what is compared across stores must not."""

    def ranked(catalog: Catalog, chunk_id: ChunkId) -> list[str]:
        texts = {c: catalog.require(d).text for c, d, _ in catalog.chunks()}
        return [texts[c] for c in FINDERS[name](catalog).nearest(chunk_id)]

    ids = _put(shelf)
    with StoreEnvironment.open(tmp_path / "other", max_bytes=1 << 30) as env:
        other = type(shelf)(Catalog(env, TenantNamespace(b"p" * 32)))
        for mine, theirs in zip(ids, _put(other), strict=True):
            assert mine != theirs
            assert ranked(shelf.catalog, mine) == ranked(other.catalog, theirs)


def test_random_orders_differ_by_seed_and_by_chunk(shelf: Any) -> None:
    ids = _put(shelf)
    orders = [
        tuple(RandomNeighbours(shelf.catalog, seed).nearest(chunk_id))
        for seed in (0, 1)
        for chunk_id in ids[:2]
    ]
    assert len(set(orders)) == 4
    # One more chunk moves no other.
    more = shelf.put("more", "one more").chunks[0].chunk_id
    grown = RandomNeighbours(shelf.catalog, 0).nearest(ids[0])
    assert tuple(c for c in grown if c != more) == orders[0]


def test_the_embedding_of_new_chunks_is_reported(shelf: Any) -> None:
    for i in range(70):
        shelf.put(f"d{i}", f"line {i}")
    told: list[tuple[int, int]] = []
    finder = EmbeddingNeighbours(
        shelf.catalog, FixedEmbedder(), lambda done, total: told.append((done, total))
    )
    chunk_id = shelf.catalog.require("d0").chunks[0].chunk_id
    next(iter(finder.nearest(chunk_id)))
    assert told == [(64, 70), (70, 70)]
    next(iter(finder.nearest(chunk_id)))
    assert len(told) == 2
