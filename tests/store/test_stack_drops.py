"""Dropping, guarding and books of the tier stack."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from chunkcache.entry import Entry
from chunkcache.store.disk import DiskTier
from chunkcache.store.host import HostTier
from chunkcache.store.lease import Lease
from chunkcache.store.removals import note_removal
from chunkcache.store.stack import TierStack
from chunkcache.store.tier import MissReason, NotStored
from chunkcache.store.transaction import Database
from chunkcache.testing import ScriptedPrefill


def remove(env, stack, key) -> None:
    """What the removal of an entry's document does, where another document stores it again."""
    env.update(lambda txn: note_removal(txn, None, [key]))
    stack.follow_removals()


def found(stack, identity) -> Lease:
    lease = stack.load(identity)
    assert isinstance(lease, Lease)
    return lease


def in_threads(count: int, work: Callable[[], object]) -> list[object]:
    """Run ``work`` in threads at once; results, or the exceptions themselves."""

    def run(_: int) -> object:
        try:
            return work()
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_a_drop_reaches_every_tier_at_once(env, stack, make_entry):
    entries = [make_entry(i) for i in range(3)]
    for entry in entries:
        stack.load_or_prefill(entry.identity, ScriptedPrefill(entry)).release()
    held = stack.load(entries[0].identity)
    assert stack.drop([entries[0].key, entries[1].key, b"absent"]) == 2
    for entry in entries[:2]:
        assert stack.load(entry.identity) is MissReason.ABSENT
    assert torch.equal(held.entry.k, entries[0].k)
    held.release()
    with stack.load(entries[2].identity):
        pass
    with env.read() as txn:
        assert [key for key, _ in txn.scan(Database.ENTRIES)] == [entries[2].key]


def test_a_drop_before_the_computation_ends_is_on_the_lease(stack, make_entry):
    entry = make_entry()

    def prefill() -> Entry:
        stack.drop([entry.key])
        return entry

    with stack.load_or_prefill(entry.identity, prefill) as lease:
        assert lease.warning is NotStored.DROPPED
    assert stack.stats().entries == {"host": 0, "disk": 0}


def test_a_guard_decides_in_the_same_transaction(stack, make_entry):
    entry = make_entry()

    def refuse(txn) -> bool:
        txn.put(Database.CHUNKS, b"written by the guard", b"")
        return False

    with stack.load_or_prefill(entry.identity, ScriptedPrefill(entry), guard=refuse) as lease:
        assert lease.warning is NotStored.UNOWNED
    assert stack.stats().entries == {"host": 0, "disk": 0}

    def allow(txn) -> bool:
        txn.put(Database.CHUNKS, b"written by the guard", b"")
        return True

    with stack.load_or_prefill(entry.identity, ScriptedPrefill(entry), guard=allow) as lease:
        assert lease.warning is None
    assert stack.stats().entries == {"host": 1, "disk": 1}


def test_a_guards_changes_are_undone_when_it_refuses(env, stack, make_entry):
    entry = make_entry()

    def refuse(txn) -> bool:
        txn.put(Database.CHUNKS, b"written by the guard", b"")
        return False

    stack.load_or_prefill(entry.identity, ScriptedPrefill(entry), guard=refuse).release()
    with env.read() as txn:
        assert txn.num_entries(Database.CHUNKS) == 0


def test_books_balance_after_a_skewed_load(env, make_entry):
    entries = [make_entry(i) for i in range(40)]
    host = HostTier(10 * entries[0].num_bytes)
    stack = TierStack(host, DiskTier(env))
    ranks = torch.arange(1, 41).double()
    generator = torch.Generator().manual_seed(0)
    picks = torch.multinomial(1 / ranks, 400, replacement=True, generator=generator).tolist()
    host_hits = []
    for step, pick in enumerate(picks):
        with stack.load_or_prefill(entries[pick].identity, ScriptedPrefill(entries[pick])) as lease:
            assert torch.equal(lease.entry.k, entries[pick].k)
            host_hits.append(lease.source == "host")
        if step % 50 == 0:
            stack.check_integrity()
    stats = stack.stats()
    assert stats.leases_open == 0
    assert stats.prefills == len(set(picks)) == stats.entries["disk"]
    assert stats.bytes["host"] <= host.stats().capacity_bytes
    assert sum(host_hits[-100:]) >= sum(host_hits[:100])


def test_lookups_that_are_never_used_pin_nothing(stack, host, make_entry):
    entry = make_entry()
    stack.load_or_prefill(entry.identity, ScriptedPrefill(entry)).release()
    for _ in range(200):
        stack.load(entry.identity).release()
    assert host.stats().num_leases == 0


def test_many_threads_over_few_entries_in_little_ram(env, make_entry):
    entries = [make_entry(i) for i in range(12)]
    stack = TierStack(HostTier(4 * entries[0].num_bytes), DiskTier(env))

    def work(thread: int) -> int:
        generator = torch.Generator().manual_seed(thread)
        num_bad = 0
        for pick in torch.randint(12, (60,), generator=generator).tolist():
            if pick == 0 and thread == 0:
                stack.drop([entries[5].key])
            with stack.load_or_prefill(
                entries[pick].identity, ScriptedPrefill(entries[pick])
            ) as lease:
                num_bad += not torch.equal(lease.entry.k, entries[pick].k)
        return num_bad

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [0] * 8
    stats = stack.stats()
    assert stats.leases_open == 0
    assert stats.lookups == 8 * 60 == sum(stats.hits.values()) + sum(stats.misses.values())
    stack.check_integrity()


def test_forgetting_during_a_computation_keeps_it_out_of_ram_and_on_disk(env, stack, make_entry):
    """A catalog transaction has removed a document; another document's put of the chunk goes on."""
    prefill = ScriptedPrefill(make_entry())
    key = prefill.entry.key
    prefill.may_finish.clear()
    with ThreadPoolExecutor(1) as pool:
        leader = pool.submit(stack.load_or_prefill, prefill.entry.identity, prefill)
        assert prefill.started.wait(30)
        remove(env, stack, key)
        prefill.may_finish.set()
        with leader.result() as lease:
            assert lease.warning is None
    assert stack.contains(key)
    assert stack.stats().entries["host"] == 0


def test_what_ram_alone_holds_can_be_kept(env, stack, make_entry):
    prefill = ScriptedPrefill(make_entry())
    key = prefill.entry.key
    with stack.load_or_prefill(prefill.entry.identity, prefill) as lease:
        env.update(lambda txn: txn.delete(Database.ENTRIES, key))
        assert not stack.contains(key)
        assert stack.keep(lease.entry, lambda txn: False) is NotStored.UNOWNED
        assert stack.keep(lease.entry, lambda txn: True) is None
    assert stack.contains(key)
