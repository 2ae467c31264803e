"""The tier stack: one computation per key, the same bits from every tier, nothing after a drop."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from chunkcache.errors import EngineFailedError, RequestCancelledError
from chunkcache.store.disk import DiskTier
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.host import HostTier
from chunkcache.store.lease import Lease
from chunkcache.store.removals import note_removal
from chunkcache.store.stack import TierStack
from chunkcache.store.tier import MissReason, NotStored
from chunkcache.store.transaction import Database
from chunkcache.testing import ScriptedPrefill

HOST_BYTES = 1 << 20


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


def test_cold_host_and_disk_give_the_same_bits(env, stack, host, make_entry):
    entry, prefill = make_entry(), ScriptedPrefill(make_entry())
    assert stack.load(entry.identity) is MissReason.ABSENT
    with stack.load_or_prefill(entry.identity, prefill) as cold:
        assert (cold.source, cold.miss, cold.warning) == ("computed", MissReason.ABSENT, None)
    with stack.load_or_prefill(entry.identity, prefill) as warm:
        assert (warm.source, warm.miss) == ("host", None)
    host.clear()
    with stack.load(entry.identity) as read:
        assert read.source == "disk"
    with stack.load(entry.identity) as again:
        assert again.source == "host"
    for lease in (cold, warm, read, again):
        assert torch.equal(lease.entry.k, entry.k)
        assert torch.equal(lease.entry.v, entry.v)
    stats = stack.stats()
    assert (stats.lookups, stats.hits) == (5, {"host": 2, "disk": 1})
    assert (stats.prefills, stats.stored, prefill.num_calls) == (1, 1, 1)
    assert stats.misses == {MissReason.ABSENT: 2}
    assert stats.entries == {"host": 1, "disk": 1}
    assert stats.bytes["host"] == entry.num_bytes


def test_a_stack_without_a_disk_keeps_entries_in_ram_alone(host, make_entry):
    stack, prefill = TierStack(host, None), ScriptedPrefill(make_entry())
    for _ in range(2):
        stack.load_or_prefill(prefill.entry.identity, prefill).release()
    assert prefill.num_calls == 1
    bad = make_entry(2)
    bad.k[0, 0, 0, 0] = torch.nan
    prefill = ScriptedPrefill(bad)
    for _ in range(2):
        with stack.load_or_prefill(bad.identity, prefill) as lease:
            assert lease.warning is NotStored.NON_FINITE
    assert prefill.num_calls == 2
    assert stack.stats().bytes["disk"] == 0


def test_sixteen_want_one_entry_and_one_computes(stack, make_entry):
    prefill = ScriptedPrefill(make_entry())
    prefill.may_finish.clear()
    releaser = threading.Thread(
        target=lambda: prefill.started.wait(30) and prefill.may_finish.set()
    )
    releaser.start()
    leases = in_threads(16, lambda: stack.load_or_prefill(prefill.entry.identity, prefill))
    releaser.join()
    assert prefill.num_calls == 1
    sources = []
    for lease in leases:
        assert isinstance(lease, Lease)
        assert torch.equal(lease.entry.k, prefill.entry.k)
        sources.append(lease.source)
        lease.release()
    assert sources.count("computed") == 1


def test_waiters_are_served_even_if_the_host_has_no_room(env, make_entry):
    stack, prefill = TierStack(HostTier(0), DiskTier(env)), ScriptedPrefill(make_entry())
    prefill.may_finish.clear()
    waiting = threading.Semaphore(0)

    def want() -> Lease:
        waiting.release()
        return stack.load_or_prefill(prefill.entry.identity, prefill)

    def let_go() -> None:
        for _ in range(8):
            waiting.acquire()
        prefill.may_finish.set()

    releaser = threading.Thread(target=let_go)
    releaser.start()
    leases = in_threads(8, want)
    releaser.join()
    assert prefill.num_calls == 1
    for lease in leases:
        assert isinstance(lease, Lease)
        assert torch.equal(lease.entry.v, prefill.entry.v)
        lease.release()
    assert stack.stats().leases_open == 0


def test_a_failed_computation_leaves_nothing_and_the_next_call_tries_again(stack, make_entry):
    prefill = ScriptedPrefill(make_entry(), failures=1)
    prefill.may_finish.clear()
    num_waiting = threading.Semaphore(0)

    def want() -> Lease:
        num_waiting.release()
        return stack.load_or_prefill(prefill.entry.identity, prefill)

    def let_go() -> None:
        for _ in range(16):
            num_waiting.acquire()
        prefill.may_finish.set()

    releaser = threading.Thread(target=let_go)
    releaser.start()
    results = in_threads(16, want)
    releaser.join()
    errors = [r for r in results if isinstance(r, EngineFailedError)]
    leases = [r for r in results if isinstance(r, Lease)]
    # A thread that came after the failure computed again; the others got the error.
    assert len(errors) + len(leases) == 16
    assert prefill.error in errors
    assert prefill.num_calls == 1 + bool(leases)
    for lease in leases:
        lease.release()
    with stack.load_or_prefill(prefill.entry.identity, prefill) as lease:
        assert torch.equal(lease.entry.k, prefill.entry.k)
    assert prefill.num_calls == 2


def start_follower(stack, prefill, work):
    """Run ``work`` in a thread while ``prefill`` is under way in another; both results."""
    with ThreadPoolExecutor(2) as pool:
        prefill.may_finish.clear()
        leader = pool.submit(stack.load_or_prefill, prefill.entry.identity, prefill)
        assert prefill.started.wait(30)
        follower = pool.submit(work)
        prefill.may_finish.set()
        return leader, follower


def test_one_requests_cancellation_is_not_anothers(stack, make_entry):
    prefill = ScriptedPrefill(make_entry(), failures=1, error=RequestCancelledError("cancelled"))
    leader, follower = start_follower(
        stack, prefill, lambda: stack.load_or_prefill(prefill.entry.identity, prefill)
    )
    assert isinstance(leader.exception(), RequestCancelledError)
    with follower.result() as lease:
        assert lease.source == "computed"
    # The follower's lookup was counted once, although it looked twice.
    assert stack.stats().lookups == 2


def test_a_plain_load_does_not_inherit_a_failure(stack, make_entry):
    prefill = ScriptedPrefill(make_entry(), failures=1)
    leader, follower = start_follower(stack, prefill, lambda: stack.load(prefill.entry.identity))
    assert isinstance(leader.exception(), EngineFailedError)
    assert follower.result() is MissReason.ABSENT


def test_values_that_are_not_finite_are_served_once_and_kept_nowhere(stack, make_entry):
    entry = make_entry()
    entry.v[0, 0, 0, 0] = torch.inf
    prefill = ScriptedPrefill(entry)
    for _ in range(2):
        with stack.load_or_prefill(entry.identity, prefill) as lease:
            assert lease.warning is NotStored.NON_FINITE
    assert prefill.num_calls == 2
    stats = stack.stats()
    assert stats.not_stored == {NotStored.NON_FINITE: 2}
    assert stats.entries == {"host": 0, "disk": 0}


def test_a_full_store_still_serves(tmp_path, make_entry):
    with StoreEnvironment.open(tmp_path / "s", max_bytes=64 << 20) as env:
        stack = TierStack(HostTier(1 << 30), DiskTier(env))
        small = make_entry(1)
        stack.load_or_prefill(small.identity, ScriptedPrefill(small)).release()
        large = make_entry(2, num_layers=70_000)
        with stack.load_or_prefill(large.identity, ScriptedPrefill(large)) as lease:
            assert lease.warning is NotStored.STORE_FULL
        with found(stack, large.identity) as lease:
            assert lease.source == "host"
        stack.close()
        assert stack.load(large.identity) is MissReason.ABSENT
        with found(stack, small.identity) as lease:
            assert lease.source == "disk"
        assert stack.stats().not_stored == {NotStored.STORE_FULL: 1}


def test_a_read_only_store_still_serves(tmp_path, make_entry):
    entry = make_entry()
    StoreEnvironment.open(tmp_path / "s", max_bytes=1 << 28).close()
    with StoreEnvironment.open(tmp_path / "s", max_bytes=1 << 28, read_only=True) as env:
        stack = TierStack(HostTier(HOST_BYTES), DiskTier(env))
        with stack.load_or_prefill(entry.identity, ScriptedPrefill(entry)) as lease:
            assert lease.warning is NotStored.READ_ONLY


def test_a_damaged_entry_is_computed_again_and_replaced(env, stack, host, make_entry):
    entry = make_entry()
    prefill = ScriptedPrefill(entry)
    stack.load_or_prefill(entry.identity, prefill).release()
    host.clear()
    env.update(lambda txn: txn.put(Database.ENTRIES, entry.key, b"rubbish"))
    with stack.load_or_prefill(entry.identity, prefill) as lease:
        assert lease.miss is MissReason.TRUNCATED
        assert torch.equal(lease.entry.k, entry.k)
    host.clear()
    with stack.load_or_prefill(entry.identity, prefill) as lease:
        assert lease.source == "disk"
    assert prefill.num_calls == 2
    assert stack.stats().quarantined == 1


def test_an_entry_under_anothers_key_in_ram_is_computed_again(stack, host, make_entry):
    entry, other = make_entry(1), make_entry(2)
    host.put(replace(other, key=entry.key)).release()
    with stack.load_or_prefill(entry.identity, ScriptedPrefill(entry)) as lease:
        assert lease.miss is MissReason.TOKEN_IDS_MISMATCH
        assert torch.equal(lease.entry.k, entry.k)
    assert stack.stats().misses == {MissReason.TOKEN_IDS_MISMATCH: 1}


def test_a_drop_during_the_computation_keeps_it_from_being_kept(stack, make_entry):
    prefill = ScriptedPrefill(make_entry())
    leader, follower = start_follower(stack, prefill, lambda: stack.drop([prefill.entry.key]))
    # Whether the drop came before or after the entry was kept, it is nowhere now.
    follower.result()
    leader.result().release()
    assert stack.load(prefill.entry.identity) is MissReason.ABSENT
    assert stack.stats().entries == {"host": 0, "disk": 0}


def test_the_thread_of_prefills_does_not_wait_for_one_that_waits_for_it(stack, make_entry):
    entry = make_entry()
    leader = ScriptedPrefill(entry)
    leader.may_finish.clear()
    own = ScriptedPrefill(entry)
    with ThreadPoolExecutor(1) as pool:
        led = pool.submit(lambda: stack.load_or_prefill(entry.identity, leader))
        assert leader.started.wait(30)
        assert stack.load(entry.identity, waits=False) is MissReason.ABSENT
        lease = stack.load_or_prefill(entry.identity, own, waits=False)
        assert (lease.source, lease.warning, own.num_calls) == ("computed", None, 1)
        # What goes meanwhile goes from both.
        stack.drop([entry.key])
        leader.may_finish.set()
        other = led.result(30)
    assert other.warning is NotStored.DROPPED
    assert torch.equal(other.entry.k, lease.entry.k)
    lease.release()
    other.release()
    assert stack.load(entry.identity) is MissReason.ABSENT


def test_a_removal_reaches_both_who_compute_one_entry(env, stack, host, make_entry):
    entry = make_entry()
    leader, own = ScriptedPrefill(entry), ScriptedPrefill(entry)
    leader.may_finish.clear()
    own.may_finish.clear()
    with ThreadPoolExecutor(2) as pool:
        led = pool.submit(lambda: stack.load_or_prefill(entry.identity, leader))
        assert leader.started.wait(30)
        beside = pool.submit(lambda: stack.load_or_prefill(entry.identity, own, waits=False))
        assert own.started.wait(30)
        remove(env, stack, entry.key)
        leader.may_finish.set()
        own.may_finish.set()
        for lease in (led.result(30), beside.result(30)):
            lease.release()
    assert not host.contains(entry.key)


def test_where_ram_keeps_nothing_an_entry_is_read_where_the_disk_has_it(env, make_entry):
    entry = make_entry(num_tokens=200)
    stack = TierStack(HostTier(0), DiskTier(env))
    prefill = ScriptedPrefill(entry)
    with stack.load_or_prefill(entry.identity, prefill, may_lend=True) as lease:
        assert lease.source == "computed"
    with stack.load_or_prefill(entry.identity, prefill, may_lend=True) as lease:
        assert lease.source == "disk"
        assert not lease.entry.k.is_contiguous(), "it was copied"
        assert torch.equal(lease.entry.k, entry.k)
        with ThreadPoolExecutor(1) as another:
            assert another.submit(stack.stats).result().leases_open == 1
    with stack.load_or_prefill(entry.identity, prefill) as lease:
        assert lease.entry.k.is_contiguous()
    stats = stack.stats()
    assert (stats.hits["disk"], stats.prefills, stats.leases_open) == (2, 1, 0)


def test_many_threads_are_lent_the_same_entry(env, make_entry):
    entry = make_entry(num_tokens=200)
    DiskTier(env).put(entry)
    stack = TierStack(HostTier(0), DiskTier(env))

    def read() -> bool:
        with stack.load_or_prefill(entry.identity, ScriptedPrefill(entry), may_lend=True) as lease:
            return torch.equal(lease.entry.k, entry.k)

    assert in_threads(8, read) == [True] * 8
    assert stack.stats().leases_open == 0
