"""Leases, the byte ledger, pins and the host tier: books balance, what is held stays."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from chunkcache.entry import Entry
from chunkcache.errors import PinLimitError
from chunkcache.identity import EntryIdentity, ModelDigest, TenantNamespace
from chunkcache.store.eviction.lru import LruPolicy
from chunkcache.store.eviction.registry import EVICTION_NAMES, make_eviction
from chunkcache.store.host import HostTier
from chunkcache.store.lease import ByteLedger, Lease


def small_entry(seed: int, num_tokens: int = 1) -> Entry:
    """An entry of 16 bytes a token that holds its seed everywhere."""
    identity = EntryIdentity(
        ModelDigest(b"m"), TenantNamespace(b"n"), "alone", (), "raw32", (seed,) * num_tokens
    )
    k = torch.full((1, num_tokens, 1, 2), float(seed))
    return Entry(identity, identity.key(), k=k, v=k.clone())


def put_and_release(tier: HostTier, *seeds: int) -> None:
    for seed in seeds:
        tier.put(small_entry(seed)).release()


def holds(tier: HostTier, seed: int) -> bool:
    lease = tier.get(small_entry(seed).key)
    if lease is None:
        return False
    lease.release()
    return True


def test_a_lease_is_released_once_however_often_it_is_asked():
    calls = []
    lease = Lease(small_entry(1), "host", lambda: calls.append(1))
    with lease:
        assert not lease.is_released
        lease.release()
    lease.release()
    assert lease.is_released
    assert calls == [1]


def test_a_lease_is_released_once_by_many_threads():
    tier = HostTier(1_000)
    lease = tier.put(small_entry(1))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: lease.release(), range(64)))
    assert tier.stats().num_leases == 0
    tier.check_integrity()


def test_a_lease_is_released_when_its_block_fails():
    tier = HostTier(1_000)
    with pytest.raises(ZeroDivisionError), tier.put(small_entry(1)):
        raise ZeroDivisionError
    assert tier.stats().num_leases == 0


def test_the_ledger_refuses_to_go_out_of_bounds():
    ledger = ByteLedger(10)
    ledger.take(7)
    assert (ledger.used_bytes, ledger.free_bytes) == (7, 3)
    for call in (lambda: ledger.take(4), lambda: ledger.give_back(8), lambda: ledger.take(-1)):
        with pytest.raises(AssertionError):
            call()
    ledger.check_integrity(7)
    with pytest.raises(AssertionError):
        ledger.check_integrity(6)


def test_the_least_recently_used_goes_first():
    tier = HostTier(48, LruPolicy())
    put_and_release(tier, 1, 2, 3)
    assert holds(tier, 1)
    put_and_release(tier, 4, 5)
    assert [holds(tier, seed) for seed in (1, 2, 3, 4, 5)] == [True, False, False, True, True]
    assert tier.stats().evictions == 2


def test_a_leased_entry_is_not_evicted():
    tier = HostTier(32, LruPolicy())
    lease = tier.put(small_entry(1))
    put_and_release(tier, 2, 3, 4)
    assert holds(tier, 1)
    assert not holds(tier, 3)
    lease.release()
    put_and_release(tier, 5, 6)
    assert not holds(tier, 1)


def test_an_entry_that_cannot_fit_evicts_nothing_and_is_served():
    tier = HostTier(32)
    put_and_release(tier, 1, 2)
    with tier.put(small_entry(3, num_tokens=3)) as large:
        assert large.entry.num_tokens == 3
        assert tier.stats().num_leases == 1
    held = [tier.put(small_entry(4)), tier.get(small_entry(2).key)]
    assert held[1] is not None
    with tier.put(small_entry(5, num_tokens=2)):
        pass
    stats = tier.stats()
    assert (stats.rejections, stats.num_entries, stats.used_bytes) == (2, 2, 32)
    for lease in held:
        lease.release()
    assert tier.stats().num_leases == 0
    tier.check_integrity()


def test_a_discarded_entry_is_not_found_and_freed_with_its_last_lease():
    tier = HostTier(32)
    first = tier.put(small_entry(1))
    second = tier.get(small_entry(1).key)
    assert second is not None
    assert tier.discard(small_entry(1).key)
    assert not tier.discard(small_entry(1).key)
    assert not holds(tier, 1)
    assert tier.stats().used_bytes == 16
    assert first.entry.k[0, 0, 0, 0] == 1
    again = tier.put(small_entry(1))
    first.release()
    first.release()
    assert tier.stats().used_bytes == 32
    second.release()
    assert tier.stats().used_bytes == 16
    tier.clear()
    again.release()
    assert tier.stats().used_bytes == 0
    tier.check_integrity()


def test_a_second_put_of_a_key_keeps_the_first_entry():
    tier = HostTier(100)
    first = small_entry(1)
    with tier.put(first), tier.put(small_entry(1)) as lease:
        assert lease.entry is first
    assert tier.stats().num_entries == 1


def test_a_tier_of_no_bytes_serves_and_keeps_nothing():
    tier = HostTier(0)
    put_and_release(tier, 1)
    assert not holds(tier, 1)


def test_entries_stay_whole_while_others_are_evicted():
    tier = HostTier(16 * 6)
    failures = []
    stop = threading.Event()

    def read(thread: int) -> None:
        while not stop.is_set():
            for seed in range(4):
                lease = tier.get(small_entry(seed).key) or tier.put(small_entry(seed))
                with lease:
                    if (
                        not (lease.entry.k == seed).all()
                        or lease.entry.identity.token_ids[0] != seed
                    ):
                        failures.append((thread, seed))

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for seed in range(10, 500):
        put_and_release(tier, seed)
        if seed % 50 == 0:
            tier.check_integrity()
            tier.discard(small_entry(seed % 4).key)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert tier.stats().num_leases == 0
    tier.check_integrity()


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("name", EVICTION_NAMES)
def test_a_pinned_entry_stays_until_its_time_is_over(name):
    clock = Clock()
    tier = HostTier(32, make_eviction(name, 32), clock=clock)
    put_and_release(tier, 1)
    tier.pin(small_entry(1), 60)
    tier.pin(small_entry(1), 10)
    assert tier.stats().pinned_bytes == 16
    for seed in (2, 2, 3, 3, 4, 4):
        put_and_release(tier, seed)
    assert tier.contains(small_entry(1).key)
    clock.now_s += 61
    assert not tier.is_pinned(small_entry(1).key)
    for seed in (5, 6, 5, 6, 5, 6):
        put_and_release(tier, seed)
    assert not tier.contains(small_entry(1).key)
    assert tier.stats().pinned_bytes == 0
    tier.check_integrity()


def test_pins_are_refused_beyond_their_share():
    tier = HostTier(64, max_pinned_ratio=0.5)
    for seed in (1, 2):
        tier.pin(small_entry(seed), 60)
    with pytest.raises(PinLimitError) as refusal:
        tier.pin(small_entry(3), 60)
    assert (refusal.value.code, refusal.value.status) == ("pin_limit", 507)
    tier.pin(small_entry(2), 90)
    assert tier.unpin(small_entry(1).key)
    assert not tier.unpin(small_entry(1).key)
    tier.pin(small_entry(3), 60)
    assert tier.stats().pinned_bytes == 32
    tier.check_integrity()


def test_a_pin_is_refused_where_leases_leave_no_room():
    tier = HostTier(32)
    with tier.put(small_entry(1)), tier.put(small_entry(2)), pytest.raises(PinLimitError):
        tier.pin(small_entry(3), 60)
    tier.check_integrity()
    tier.pin(small_entry(3), 60)
    assert tier.contains(small_entry(3).key)


def test_a_discard_ends_the_pin():
    tier = HostTier(32)
    tier.pin(small_entry(1), 60)
    assert tier.discard(small_entry(1).key)
    assert not tier.is_pinned(small_entry(1).key)
    assert tier.stats().pinned_bytes == 0
    tier.check_integrity()


class HostTierMachine(RuleBasedStateMachine):
    """Any order of calls, under any policy, leaves the books balanced and what is held in place."""

    leases = Bundle("leases")

    @initialize(name=st.sampled_from(EVICTION_NAMES))
    def open(self, name: str) -> None:
        self.clock = Clock()
        self.tier = HostTier(100, make_eviction(name, 100), clock=self.clock)
        self.num_open = 0

    @rule(target=leases, seed=st.integers(0, 5), num_tokens=st.integers(1, 7))
    def put(self, seed: int, num_tokens: int) -> Lease:
        self.num_open += 1
        return self.tier.put(small_entry(seed, num_tokens))

    @rule(target=leases, seed=st.integers(0, 5), num_tokens=st.integers(1, 7))
    def get(self, seed: int, num_tokens: int) -> Lease | None:
        lease = self.tier.get(small_entry(seed, num_tokens).key)
        self.num_open += lease is not None
        return lease

    @rule(seed=st.integers(0, 5), num_tokens=st.integers(1, 4), ttl_s=st.sampled_from([1, 10]))
    def pin(self, seed: int, num_tokens: int, ttl_s: int) -> None:
        entry = small_entry(seed, num_tokens)
        try:
            self.tier.pin(entry, ttl_s)
        except PinLimitError:
            assert not self.tier.is_pinned(entry.key)
        else:
            assert self.tier.contains(entry.key)

    @rule(seed=st.integers(0, 5), num_tokens=st.integers(1, 4))
    def unpin(self, seed: int, num_tokens: int) -> None:
        self.tier.unpin(small_entry(seed, num_tokens).key)

    @rule(seed=st.integers(0, 5), num_tokens=st.integers(1, 7), in_s=st.sampled_from([0, 5]))
    def expect_use(self, seed: int, num_tokens: int, in_s: int) -> None:
        entry = small_entry(seed, num_tokens)
        assert self.tier.expect_use(entry, in_s) == self.tier.contains(entry.key)

    @rule()
    def wait(self) -> None:
        self.clock.now_s += 4

    @rule(seed=st.integers(0, 5), num_tokens=st.integers(1, 7))
    def discard(self, seed: int, num_tokens: int) -> None:
        self.tier.discard(small_entry(seed, num_tokens).key)

    @rule(lease=consumes(leases), times=st.integers(1, 2))
    def release(self, lease: Lease | None, times: int) -> None:
        if lease is not None:
            for _ in range(times):
                lease.release()
            self.num_open -= 1

    @rule(lease=leases)
    def read(self, lease: Lease | None) -> None:
        if lease is not None:
            assert (lease.entry.k == lease.entry.identity.token_ids[0]).all()

    @rule()
    def clear(self) -> None:
        self.tier.clear()

    @invariant()
    def books_balance(self) -> None:
        self.tier.check_integrity()
        stats = self.tier.stats()
        assert stats.num_leases == self.num_open
        assert 0 <= stats.pinned_bytes <= stats.capacity_bytes // 2
        assert 0 <= stats.used_bytes <= stats.capacity_bytes


HostTierMachine.TestCase.settings = settings(max_examples=60, deadline=None)
TestHostTierMachine = HostTierMachine.TestCase
