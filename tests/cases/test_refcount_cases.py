"""Case tests, area C: leases, pins and bytes of the tiers; concurrent misses."""

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from chunkcache.entry import Entry
from chunkcache.errors import EngineFailedError, RequestCancelledError
from chunkcache.identity import EntryIdentity, ModelDigest, TenantNamespace
from chunkcache.planning import AskOptions
from chunkcache.store.disk import DiskTier
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.eviction.registry import EVICTION_NAMES, make_eviction
from chunkcache.store.host import HostTier
from chunkcache.store.stack import TierStack
from chunkcache.testing import ScriptedPrefill

Caches = Callable[..., Any]
Passages = dict[str, str]


def _entry(seed: int, num_tokens: int = 4) -> Entry:
    """An entry of 16 bytes a token that holds its seed everywhere."""
    identity = EntryIdentity(
        ModelDigest(b"m" * 32),
        TenantNamespace(b"n" * 32),
        "alone",
        (),
        "raw32",
        (seed,) * num_tokens,
    )
    k = torch.full((1, num_tokens, 1, 2), float(seed))
    return Entry(identity, identity.key(), k, k.clone())


ENTRY_BYTES = _entry(0).num_bytes


@pytest.mark.parametrize("name", EVICTION_NAMES)
def test_C01_lookups_that_are_given_up_hold_nothing(name: str) -> None:
    """A thousand requests look up and end before they use it; then new chunks find room."""
    tier = HostTier(20 * ENTRY_BYTES, make_eviction(name, 20 * ENTRY_BYTES))
    for seed in range(20):
        tier.put(_entry(seed)).release()
    for number in range(1_000):
        lease = tier.get(_entry(number % 20).key)
        if lease is not None:
            lease.release()
    assert tier.stats().num_leases == 0
    for seed in range(100, 160):
        with tier.put(_entry(seed)) as lease:
            assert lease.entry.k[0, 0, 0, 0] == seed
    stats = tier.stats()
    assert stats.evictions + stats.rejections == 60
    assert stats.num_leases == 0
    tier.check_integrity()


def test_C01_refused_questions_hold_nothing(open_cache: Caches, passages: Passages) -> None:
    """A question that is too long is refused behind the look-up of its documents."""
    cache = open_cache()
    for name, text in passages.items():
        cache.put(name, text)
    for _ in range(20):
        with pytest.raises(Exception, match="tokens"):
            cache.answer("word " * 5_000, list(passages), max_tokens=1)
    assert cache.runtime.stack.stats().leases_open == 0
    cache.runtime.pool.check_integrity()


@pytest.mark.parametrize("name", EVICTION_NAMES)
def test_C02_bytes_add_up_through_skewed_traffic(name: str) -> None:
    """Room for 50 chunks, 2,000 look-ups over 200: books balance, the hit ratio does not sink."""
    tier = HostTier(50 * ENTRY_BYTES, make_eviction(name, 50 * ENTRY_BYTES))
    draw = random.Random(0)
    weights = [1 / (rank + 1) for rank in range(200)]
    seeds = draw.choices(range(200), weights, k=2_000)
    hits: list[bool] = []
    for number, seed in enumerate(seeds):
        lease = tier.get(_entry(seed).key)
        hits.append(lease is not None)
        (lease or tier.put(_entry(seed))).release()
        if number % 100 == 0:
            tier.check_integrity()
    assert sum(hits[-200:]) >= 0.9 * sum(hits[100:300])
    stats = tier.stats()
    assert stats.used_bytes == stats.num_entries * ENTRY_BYTES <= stats.capacity_bytes
    assert stats.num_leases == 0


@pytest.mark.parametrize("name", EVICTION_NAMES)
def test_C03_an_evicted_entry_stays_whole_for_who_holds_it(name: str) -> None:
    """Eight threads read one chunk over and over while a ninth pushes it out."""
    tier = HostTier(6 * ENTRY_BYTES, make_eviction(name, 6 * ENTRY_BYTES))
    wanted = _checksum(_entry(1))
    mismatches: list[str] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            with tier.get(_entry(1).key) or tier.put(_entry(1)) as lease:
                if _checksum(lease.entry) != wanted:
                    mismatches.append("other bytes")

    with ThreadPoolExecutor(8) as pool:
        readers = [pool.submit(read) for _ in range(8)]
        for seed in range(2, 400):
            tier.put(_entry(seed)).release()
            tier.discard(_entry(1).key)
        stop.set()
        for reader in readers:
            reader.result(30)
    assert mismatches == []
    assert tier.stats().num_leases == 0
    tier.check_integrity()


@pytest.mark.parametrize("order", sorted(set(permutations(["unpin", "drop", "release", "drop"]))))
def test_C04_every_order_of_letting_go_frees_once(order: Sequence[str]) -> None:
    """Unpin, drop and release, in any order and more than once, end in the same empty tier."""
    tier = HostTier(10 * ENTRY_BYTES)
    lease = tier.put(_entry(1))
    tier.pin(_entry(1), 600)
    steps: dict[str, Callable[[], object]] = {
        "unpin": lambda: tier.unpin(_entry(1).key),
        "drop": lambda: tier.discard(_entry(1).key),
        "release": lease.release,
    }
    for step in (*order, "unpin", "drop", "release"):
        steps[step]()
        tier.check_integrity()
    stats = tier.stats()
    assert (stats.used_bytes, stats.pinned_bytes, stats.num_leases, stats.num_entries) == (0,) * 4


def test_C09_sixteen_questions_over_a_cold_chunk_compute_it_once(
    open_cache: Caches, passages: Passages
) -> None:
    """They all get the answer of one alone."""
    cache = open_cache()
    cache.put("tower", passages["tower"])
    expected = cache.answer("Who keeps the key?", ["tower"], max_tokens=4).token_ids
    stack = cache.runtime.stack
    identity = cache.plan("", ["tower"], AskOptions()).identities[0]
    stack.drop([identity.key()])
    before = stack.stats().prefills
    with ThreadPoolExecutor(16) as pool:
        asked = [
            pool.submit(cache.answer, "Who keeps the key?", ["tower"], max_tokens=4)
            for _ in range(16)
        ]
        answers = [future.result(60).token_ids for future in asked]
    assert answers == [expected] * 16
    assert stack.stats().prefills == before + 1


def test_C09_a_failed_computation_reaches_every_waiter_and_leaves_nothing(tmp_path: Path) -> None:
    """Waiters get the error or try again; none hangs and nothing is half stored."""
    entry = _entry(1)
    prefill = ScriptedPrefill(entry, failures=1)
    with StoreEnvironment.open(tmp_path / "store", max_bytes=1 << 24) as env:
        stack = TierStack(HostTier(1_000), DiskTier(env))

        def load() -> str:
            try:
                with stack.load_or_prefill(entry.identity, prefill) as lease:
                    return lease.source
            except EngineFailedError:
                return "failed"

        with ThreadPoolExecutor(16) as pool:
            outcomes = [f.result(30) for f in [pool.submit(load) for _ in range(16)]]
        assert "failed" in outcomes
        with stack.load_or_prefill(entry.identity, prefill) as lease:
            assert torch.equal(lease.entry.k, entry.k)
        assert prefill.num_calls == 2
        assert stack.stats().entries == {"host": 1, "disk": 1}
        assert stack.stats().leases_open == 0
        stack.close()


def test_C11_questions_given_up_while_loading_give_everything_back(
    open_cache: Caches, passages: Passages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients leave while an entry is being read from a slow disk; pages and leases return."""
    cache = open_cache(host_tier_bytes=0)
    cache.put("tower", passages["tower"])
    reads_on, may_read = threading.Event(), threading.Event()
    read = DiskTier.lend

    def slow(tier: DiskTier, identity: EntryIdentity) -> Any:
        reads_on.set()
        assert may_read.wait(30)
        return read(tier, identity)

    monkeypatch.setattr(DiskTier, "lend", slow)
    free = cache.runtime.pool.num_free_pages
    options = AskOptions(policy="none", max_tokens=8)
    streams = [cache.stream("Who?", ["tower"], options) for _ in range(5)]
    assert reads_on.wait(30)
    for stream in streams:
        stream.cancel()
    may_read.set()
    for stream in streams:
        with pytest.raises(RequestCancelledError):
            stream.finished()
    assert cache.runtime.pool.num_free_pages == free
    assert cache.runtime.stack.stats().leases_open == 0


def _checksum(entry: Entry) -> bytes:
    return xxhash.xxh3_64_digest(entry.k.numpy().tobytes() + entry.v.numpy().tobytes())
