"""Records of neighbours: both directions in step, and no entry outlives a chunk that it traces."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chunkcache.catalog import Catalog
from chunkcache.catalog_neighbours import NeighboursRecord
from chunkcache.catalog_records import ChunkRecord
from chunkcache.catalog_values import Neighbour, Removed
from chunkcache.entry import Entry
from chunkcache.errors import InvalidValueError
from chunkcache.identity import ChunkId, ChunkKey, TenantNamespace
from chunkcache.store.disk import DiskTier
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.records import decode_record
from chunkcache.store.tier import UnownedEntryError
from chunkcache.store.transaction import Database

NAMESPACE = TenantNamespace(b"n" * 32)
OTHER = TenantNamespace(b"o" * 32)
PREPARATION = "neighbours(2)"

MakeDocument = Callable[..., Any]
MakeEntry = Callable[..., Entry]


@pytest.fixture
def catalog(env: StoreEnvironment) -> Catalog:
    return Catalog(env, NAMESPACE)


def _put(catalog: Catalog, make_document: MakeDocument, *words: str) -> dict[str, Neighbour]:
    """One document of one chunk per word."""
    found = {}
    for word in words:
        (chunk,) = catalog.put(make_document(word, word), now=1.0).document.chunks
        found[word] = Neighbour(chunk.chunk_id, chunk.token_ids)
    return found


def test_neighbours_are_kept_in_order_and_never_change(
    catalog: Catalog, make_document: MakeDocument
) -> None:
    n = _put(catalog, make_document, "a", "b", "c")
    a, b, c = (n[w].chunk_id for w in "abc")
    assert catalog.put_neighbours(PREPARATION, {a: [n["c"], n["b"]], b: [n["a"]]}) == 2
    assert catalog.get_neighbours(PREPARATION, [a, b, c]) == {
        a: (n["c"], n["b"]),
        b: (n["a"],),
    }
    assert catalog.get_neighbours("neighbours(3)", [a]) == {}
    assert catalog.put_neighbours(PREPARATION, {a: [n["b"]]}) == 1
    assert catalog.get_neighbours(PREPARATION, [a])[a] == (n["c"], n["b"])


def test_a_chunk_that_is_gone_is_no_neighbour_and_gets_none(
    catalog: Catalog, make_document: MakeDocument
) -> None:
    n = _put(catalog, make_document, "a", "b", "c")
    catalog.delete("c")
    found = {n["a"].chunk_id: [n["b"], n["c"]], n["c"].chunk_id: [n["a"]]}
    assert catalog.put_neighbours(PREPARATION, found) == 0
    assert catalog.get_neighbours(PREPARATION, found) == {}


def test_another_tenants_chunk_is_no_neighbour(
    env: StoreEnvironment, catalog: Catalog, make_document: MakeDocument
) -> None:
    n = _put(catalog, make_document, "a")
    theirs = Catalog(env, OTHER)
    (chunk,) = theirs.put(make_document("b", "b", namespace=OTHER), now=1.0).document.chunks
    stranger = Neighbour(chunk.chunk_id, chunk.token_ids)
    assert catalog.put_neighbours(PREPARATION, {n["a"].chunk_id: [stranger]}) == 0
    assert theirs.put_neighbours(PREPARATION, {stranger.chunk_id: [n["a"]]}) == 0


def test_a_deletion_takes_what_was_prepared_behind_it(
    env: StoreEnvironment, catalog: Catalog, make_document: MakeDocument, make_entry: MakeEntry
) -> None:
    """A behind B and C, C behind A: without B, A has no entry and no record, and C keeps its."""
    n = _put(catalog, make_document, "a", "b", "c")
    a, b, c = (n[w].chunk_id for w in "abc")
    catalog.put_neighbours(PREPARATION, {a: [n["b"], n["c"]], c: [n["a"]]})
    behind_bc, behind_a, alone = (make_entry(i) for i in range(3))
    tier = DiskTier(env)
    for entry, traced in ((behind_bc, (a, b, c)), (behind_a, (c, a)), (alone, (a,))):
        tier.put(entry, lambda txn, e=entry, t=traced: catalog.link_entry_in(txn, e.key, t))
    removed = catalog.delete("b").removed
    assert removed == Removed((b,), (behind_bc.key,), (a,))
    assert catalog.get_neighbours(PREPARATION, [a, c]) == {c: (n["a"],)}
    assert not tier.contains(behind_bc.key)
    assert tier.contains(behind_a.key)
    # A's own entries go with it, that of C behind it too, and nothing is counted twice.
    assert catalog.delete("a").removed == Removed(
        (a,), tuple(sorted((behind_a.key, alone.key))), (c,)
    )
    assert tier.num_entries == 0


def test_an_entry_behind_a_chunk_that_is_gone_is_not_kept(
    env: StoreEnvironment, catalog: Catalog, make_document: MakeDocument, make_entry: MakeEntry
) -> None:
    n = _put(catalog, make_document, "a", "b")
    a, b = n["a"].chunk_id, n["b"].chunk_id
    entry = make_entry(token_ids=n["a"].token_ids)
    catalog.delete("b")
    with pytest.raises(UnownedEntryError):
        DiskTier(env).put(entry, lambda txn: catalog.link_entry_in(txn, entry.key, (a, b)))
    assert catalog.delete("a").removed.entry_keys == (), "not linked to the other one either"
    behind = replace(entry, identity=replace(entry.identity, behind=(b,)))
    with pytest.raises(InvalidValueError, match="gone"):
        catalog.put(make_document("a", "a"), entries=[behind], now=1.0)
    assert DiskTier(env).num_entries == 0


WORDS = "abcde"
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"),
            st.integers(0, 3),
            st.lists(st.sampled_from(WORDS), min_size=1, max_size=3),
        ),
        st.tuples(st.just("delete"), st.integers(0, 3), st.none()),
        st.tuples(
            st.just("prepare"),
            st.sampled_from(["neighbours(1)", PREPARATION]),
            st.lists(st.sampled_from(WORDS), min_size=2, max_size=3, unique=True),
        ),
    ),
    max_size=14,
)


@dataclass
class _History:
    """What must be there, told by a second derivation: entries, and the chunks they trace."""

    env: StoreEnvironment
    catalog: Catalog
    make_document: MakeDocument
    make_entry: MakeEntry
    traces: dict[ChunkKey, frozenset[ChunkId]] = field(default_factory=dict)
    behind: dict[tuple[ChunkId, str], tuple[ChunkId, ...]] = field(default_factory=dict)
    num_entries: int = 0

    def neighbour(self, word: str) -> Neighbour:
        (chunk,) = self.make_document("x", word).chunks
        return Neighbour(chunk.chunk_id, chunk.token_ids)

    def prepare(self, preparation: str, words: list[str]) -> None:
        owner, *neighbours = map(self.neighbour, words)
        stored = {chunk_id for chunk_id, _, _ in self.catalog.chunks()}
        is_possible = {n.chunk_id for n in (owner, *neighbours)} <= stored
        self.catalog.put_neighbours(preparation, {owner.chunk_id: neighbours})
        name = (owner.chunk_id, preparation)
        if is_possible:
            self.behind.setdefault(name, tuple(n.chunk_id for n in neighbours))
        if name not in self.behind:
            return
        traced = (owner.chunk_id, *self.behind[name])
        self.num_entries += 1
        entry = self.make_entry(self.num_entries)
        DiskTier(self.env).put(
            entry, lambda txn: self.catalog.link_entry_in(txn, entry.key, traced)
        )
        self.traces[entry.key] = frozenset(traced)

    def remove(self, removed: Removed) -> None:
        gone = set(removed.chunk_ids)
        dead = {key for key, traced in self.traces.items() if traced & gone}
        broken = {n for n, chunks in self.behind.items() if gone & {n[0], *chunks}}
        assert set(removed.entry_keys) == dead
        assert set(removed.unprepared_chunk_ids) == {owner for owner, _ in broken} - gone
        for key in dead:
            del self.traces[key]
        for name in broken:
            del self.behind[name]

    def check(self) -> None:
        forward: dict[tuple[ChunkId, str], tuple[ChunkId, ...]] = {}
        reverse: set[tuple[ChunkId, ChunkId, str]] = set()
        records: dict[ChunkId, ChunkRecord] = {}
        with self.env.read() as txn:
            for key, value in txn.scan(Database.CHUNKS, NAMESPACE):
                chunk_id, kind, rest = ChunkId(key[32:64]), key[64:65], key[65:]
                if kind == b"B":
                    found = decode_record(value, NeighboursRecord, "neighbours")
                    forward[chunk_id, rest.decode()] = tuple(
                        ChunkId(n.chunk_id) for n in found.neighbours
                    )
                elif kind == b"R":
                    reverse.add((chunk_id, ChunkId(rest[:32]), rest[32:].decode()))
                else:
                    records[chunk_id] = decode_record(value, ChunkRecord, "a chunk")
            entries = {key for key, _ in txn.scan(Database.ENTRIES)}
        assert forward == self.behind
        assert reverse == {(n, c, p) for (c, p), chunks in forward.items() for n in chunks}
        assert {c for owner, chunks in self._groups(forward) for c in (owner, *chunks)} <= set(
            records
        )
        assert entries == set(self.traces)
        for chunk_id, record in records.items():
            expected = {key for key, traced in self.traces.items() if chunk_id in traced}
            assert set(record.entry_keys) == expected

    @staticmethod
    def _groups(
        forward: Mapping[tuple[ChunkId, str], tuple[ChunkId, ...]],
    ) -> list[tuple[ChunkId, tuple[ChunkId, ...]]]:
        return [(owner, chunks) for (owner, _), chunks in forward.items()]


@given(steps=STEPS)
@settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
def test_any_history_leaves_both_directions_in_step_and_no_trace_of_what_is_gone(
    steps: list[tuple[str, Any, Any]], make_document: MakeDocument, make_entry: MakeEntry
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        StoreEnvironment.open(Path(folder), max_bytes=1 << 26) as env,
    ):
        history = _History(env, Catalog(env, NAMESPACE), make_document, make_entry)
        for kind, which, words in steps:
            if kind == "put":
                document = make_document(f"d{which}", " ".join(words))
                history.remove(history.catalog.put(document, now=1.0).removed)
            elif kind == "delete":
                history.remove(history.catalog.delete(f"d{which}").removed)
            else:
                history.prepare(which, words)
            history.check()
