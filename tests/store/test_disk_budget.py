"""A budget for the entries on disk: what goes, what stays, and what is refused."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from chunkcache.catalog import Catalog
from chunkcache.entry import Entry
from chunkcache.store.disk import DiskTier
from chunkcache.store.disk_budget import DiskBudget, DiskUses
from chunkcache.store.disk_writes import keep_on_disk
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.eviction.registry import EVICTION_NAMES, make_eviction
from chunkcache.store.host import HostTier
from chunkcache.store.reports import keep_report, load_report
from chunkcache.store.stack import TierStack
from chunkcache.store.tier import MissReason, NotStored, OverBudgetError
from chunkcache.store.transaction import Database
from chunkcache.testing import ScriptedPrefill
from chunkcache.upkeep.verify import verify

NAMESPACE = b"n" * 32
BUDGET = 1 << 20
"""Room for about 13 of the entries below."""


@pytest.fixture
def make(make_entry) -> Callable[[int], Entry]:
    """Entries of 72 KiB."""
    return lambda seed: make_entry(seed, num_tokens=192)


def tier_of(env: StoreEnvironment, eviction: str = "lru", uses: DiskUses | None = None) -> DiskTier:
    return DiskTier(env, DiskBudget(BUDGET, make_eviction(eviction, BUDGET), uses))


def on_disk(env: StoreEnvironment) -> set[bytes]:
    with env.read() as txn:
        assert txn.num_bytes(Database.ENTRIES) <= BUDGET
        return {key for key, _ in txn.scan(Database.ENTRIES)}


@pytest.mark.parametrize("eviction", EVICTION_NAMES)
def test_the_budget_holds_after_every_put(env, make, eviction):
    tier = tier_of(env, eviction)
    num_refused = 0
    for seed in range(40):
        try:
            assert tier.put(make(seed))
        except OverBudgetError:
            num_refused += 1
        stored = on_disk(env)
        assert tier.budget is not None
        tier.budget.check_integrity(stored)
    assert len(stored) >= 10
    assert tier.num_evicted == 40 - num_refused - len(stored) > 0


def test_the_least_recently_used_goes_and_a_use_in_ram_counts(env, make):
    entries = [make(seed) for seed in range(20)]
    host = HostTier(entries[0].num_bytes)
    stack = TierStack(host, tier_of(env))
    for entry in entries[:10]:
        stack.load_or_prefill(entry.identity, ScriptedPrefill(entry)).release()
    for entry in entries[10:]:
        stack.load(entries[0].identity).release()
        stack.load_or_prefill(entry.identity, ScriptedPrefill(entry)).release()
    stored = on_disk(env)
    assert entries[0].key in stored
    assert entries[1].key not in stored
    assert {e.key for e in entries[-8:]} <= stored
    assert stack.stats().disk_evictions == 20 - len(stored)


def test_what_is_leased_or_pinned_stays(env, make):
    entries = [make(seed) for seed in range(30)]
    stack = TierStack(HostTier(1 << 30), tier_of(env))
    leased = stack.load_or_prefill(entries[0].identity, ScriptedPrefill(entries[0]))
    with stack.load_or_prefill(entries[1].identity, ScriptedPrefill(entries[1])) as lease:
        stack.pin(lease.entry, 60.0)
    for entry in entries[2:]:
        stack.load_or_prefill(entry.identity, ScriptedPrefill(entry)).release()
    stored = on_disk(env)
    assert {entries[0].key, entries[1].key} <= stored
    assert entries[2].key not in stored
    leased.release()


def test_what_has_no_room_is_served_from_ram_and_hits_go_on(env, make, make_entry):
    stack = TierStack(HostTier(1 << 30), tier_of(env))
    small, large = make(1), make_entry(2, num_tokens=4_000)
    stack.load_or_prefill(small.identity, ScriptedPrefill(small)).release()
    with stack.load_or_prefill(large.identity, ScriptedPrefill(large)) as lease:
        assert lease.warning is NotStored.OVER_BUDGET
    assert on_disk(env) == {small.key}
    assert stack.stats().not_stored == {NotStored.OVER_BUDGET: 1}
    for entry in (small, large):
        with stack.load(entry.identity) as lease:
            assert lease.source == "host"


def test_a_refused_put_leaves_nothing_of_its_transaction(env, make_entry):
    def guard(txn) -> bool:
        txn.put(Database.CHUNKS, b"link", b"")
        return True

    with pytest.raises(OverBudgetError):
        tier_of(env).put(make_entry(2, num_tokens=4_000), guard)
    with env.read() as txn:
        assert txn.get(Database.CHUNKS, b"link") is None


def test_documents_stay_and_evicted_entries_are_no_damage(env, make_entry, make_document):
    words = [chr(97 + i) * 192 for i in range(26)]
    catalog, tier = Catalog(env, NAMESPACE), tier_of(env)
    document = make_document("d", " ".join(words))
    catalog.put(document, now=1.0)
    for chunk in document.chunks:
        entry = make_entry(token_ids=chunk.token_ids)
        tier.put(
            entry, lambda txn, e=entry, c=chunk: catalog.link_entry_in(txn, e.key, [c.chunk_id])
        )
    assert tier.num_evicted > 5
    assert catalog.require("d") is not None
    report = verify(env)
    assert {f.fault.value for f in report.findings} == {"dangling_link"}
    assert report.num_damaged == 0
    catalog.delete("d")
    assert on_disk(env) == set()


def test_a_run_does_not_push_out_what_it_stored(env, make):
    tier, entries = tier_of(env), [make(seed) for seed in range(40)]
    with tier.sparing():
        kept = [e for e in entries if tier.would_keep(e.identity, e.num_bytes) and tier.put(e)]
    assert on_disk(env) == {e.key for e in kept} == {e.key for e in entries[: len(kept)]}
    assert 10 <= len(kept) < 20
    assert tier.num_evicted == 0
    with tier.sparing():  # again: what is there stays there
        for entry in kept:
            tier.spare(entry.key)
        assert not tier.would_keep(entries[-1].identity, entries[-1].num_bytes)
    assert tier.would_keep(entries[-1].identity, entries[-1].num_bytes), "the run is over"
    assert tier.put(entries[-1])
    assert entries[0].key not in on_disk(env)


def test_an_often_used_entry_outlives_a_restart_and_many_strangers(env, make):
    tier, favourite = tier_of(env, "value"), make(0)
    tier.put(favourite)
    for seed in range(1, 10):
        tier.put(make(seed))
        assert tier.get(favourite.identity) is not MissReason.ABSENT
        for _ in range(3):
            tier.record_use(favourite.identity, favourite.num_bytes)
    assert tier.budget is not None
    keep_report(env, "disk_uses", "", tier.budget.uses())
    path = env.path
    env.close()
    with StoreEnvironment.open(path, max_bytes=1 << 30) as again:
        tier = tier_of(again, "value", load_report(again, "disk_uses", "", DiskUses))
        for seed in range(100, 130):
            keep_on_disk(tier, make(seed), None)
        assert favourite.key in on_disk(again)
        assert tier.num_evicted >= 5


def test_without_a_history_what_is_there_is_taken_over(env, make):
    for seed in range(10):
        DiskTier(env).put(make(seed))
    tier = tier_of(env)
    for seed in range(10, 30):
        tier.put(make(seed))
    assert make(29).key in on_disk(env)


def test_a_budget_that_was_lowered_is_kept_from_the_next_put_on(env, make):
    for seed in range(40):
        DiskTier(env).put(make(seed))
    tier_of(env).put(make(40))
    assert make(40).key in on_disk(env)


WRITE = """
import sys
from pathlib import Path
import torch
from chunkcache.codecs import CODECS, LayerEncoder
from chunkcache.entry import Entry, EntryShape
from chunkcache.identity import EntryIdentity
from chunkcache.store.disk import DiskTier
from chunkcache.store.disk_budget import DiskBudget
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.eviction.lru import LruPolicy

first = int(sys.argv[2])
with StoreEnvironment.open(Path(sys.argv[1]), max_bytes=1 << 30) as env:
    tier = DiskTier(env, DiskBudget(1 << 20, LruPolicy()))
    for seed in range(first, first + 25):
        ids = tuple(seed * 1_000 + i for i in range(192))
        identity = EntryIdentity(b"m" * 32, b"n" * 32, "alone", (), "bf16", ids)
        shape = EntryShape(3, len(ids), 2, 16)
        encoder = LayerEncoder(CODECS["bf16"], shape)
        for layer in range(3):
            encoder.write(layer, torch.ones(shape.axes[1:]), torch.ones(shape.axes[1:]))
        tier.put(Entry(identity, identity.key(), encoder.k, encoder.v, encoder.scales))
"""


def test_two_processes_keep_to_one_budget(env, make):
    """Each takes the other's entries into account, and evicts them too."""
    commands = [[sys.executable, "-c", WRITE, str(env.path), str(n)] for n in (1_000, 2_000)]
    processes = [subprocess.Popen(command) for command in commands]
    tier = tier_of(env)
    for seed in range(25):
        tier.put(make(seed))
        on_disk(env)
    assert [p.wait(60) for p in processes] == [0, 0]
    assert 10 <= len(on_disk(env)) < 20
    assert tier.check_integrity() == []
