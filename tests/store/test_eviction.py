"""Eviction policies: what goes, what is let in, what is remembered."""

import random
from collections.abc import Iterable, Sequence

import pytest

from chunkcache.errors import InvalidValueError
from chunkcache.identity import ChunkKey
from chunkcache.store.eviction import value
from chunkcache.store.eviction.policy import Candidate, EvictionPolicy
from chunkcache.store.eviction.registry import EVICTION_NAMES, make_eviction
from chunkcache.store.eviction.reuse_rates import AGE_ENDS, NUM_AGES, ReuseClass, ReuseRates, age_of
from chunkcache.store.eviction.s3fifo import S3FifoPolicy
from chunkcache.store.eviction.value import ValuePolicy
from chunkcache.store.host import HostTier


class Cache:
    """The least tier that a policy can serve."""

    def __init__(self, capacity_bytes: int, policy: EvictionPolicy) -> None:
        self.capacity_bytes = capacity_bytes
        self.policy = policy
        self.held: dict[ChunkKey, int] = {}
        self.kept: set[ChunkKey] = set()
        self.num_hits = 0

    def use(self, name: str, num_tokens: int = 100, num_bytes: int | None = None) -> bool:
        """Look something up, and offer it where it is not held; says whether it was."""
        candidate = Candidate(ChunkKey(name.encode()), num_bytes or num_tokens, num_tokens)
        self.policy.record_use(candidate)
        if candidate.key in self.held:
            self.num_hits += 1
            return True
        needed = sum(self.held.values()) + candidate.num_bytes - self.capacity_bytes
        if needed > 0:
            victims = self.policy.victims(
                candidate, needed, lambda key: key not in self.kept, must_admit=False
            )
            if victims is None:
                return False
            for key in victims:
                assert key not in self.kept
                del self.held[key]
                self.policy.remove(key, is_evicted=True)
        self.policy.add(candidate)
        self.held[candidate.key] = candidate.num_bytes
        assert sum(self.held.values()) <= self.capacity_bytes
        assert set(self.policy.residents()) == set(self.held)
        return False

    def names(self) -> set[str]:
        return {key.decode() for key in self.held}


def hit_ratio(policy: EvictionPolicy, names: Sequence[str], capacity: int) -> float:
    cache = Cache(capacity * 100, policy)
    for name in names:
        cache.use(name)
    return cache.num_hits / len(names)


def popular_among_strangers(seed: int, num_uses: int = 6_000) -> list[str]:
    """A few popular names, and as many that are seen once."""
    draw = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(200)]
    popular = draw.choices(range(200), weights, k=num_uses)
    return [name for i, p in enumerate(popular) for name in (f"popular{p}", f"stranger{i}")]


@pytest.mark.parametrize("name", EVICTION_NAMES)
def test_any_traffic_keeps_the_books_and_the_held_ones(name):
    draw = random.Random(3)
    cache = Cache(2_000, make_eviction(name, 2_000))
    for i in range(1_500):
        number = int(draw.paretovariate(0.7)) % 300
        cache.use(f"{number}", (20, 90, 300)[number % 3])
        if i % 5 == 0:
            cache.kept = set(draw.sample(sorted(cache.held), min(2, len(cache.held))))
    assert cache.num_hits > 200


@pytest.mark.parametrize("name", EVICTION_NAMES)
def test_the_same_traffic_gives_the_same_residents(name):
    def residents() -> Iterable[ChunkKey]:
        cache = Cache(5_000, make_eviction(name, 5_000))
        for used in popular_among_strangers(1, 500):
            cache.use(used)
        return list(cache.policy.residents())

    assert residents() == residents()


def test_the_default_reuses_more_among_strangers():
    names = popular_among_strangers(0)
    ratios = {name: hit_ratio(make_eviction(name, 5_000), names, 50) for name in EVICTION_NAMES}
    assert ratios["value"] > ratios["lru"] + 0.05
    assert ratios["value"] > ratios["s3fifo"]


def test_one_pass_over_a_corpus_does_not_push_out_what_is_reused():
    cache = Cache(2_000, ValuePolicy())
    for _ in range(200):
        for name in range(20):
            cache.use(f"reused{name}")
    for number in range(2_000):
        cache.use(f"passing{number}")
        cache.use(f"reused{number % 20}")
    assert cache.num_hits > 3_980 + 1_800


def test_reuse_that_comes_late_but_surely_is_waited_for():
    """Turns of a conversation: used again after a while or never, by size."""
    cache = Cache(60_000, ValuePolicy())
    waiting: list[str] = []
    for i in range(3_000):
        cache.use(f"turn{i}", 400)
        waiting.append(f"turn{i}")
        for j in range(3):
            cache.use(f"once{i}/{j}", 100)
        if len(waiting) > 100:
            cache.use(waiting.pop(0), 400)
    assert cache.num_hits > 2_000


def test_twice_the_bytes_for_the_same_compute_is_half_the_value():
    cache = Cache(3_000, ValuePolicy())
    for _ in range(10):
        for name in range(10):
            cache.use(f"small{name}", 100, 100)
            cache.use(f"large{name}", 100, 200)
    cache.use("small10", 100, 100)
    for _ in range(10):
        for name in range(15):
            cache.use(f"small{name}", 100, 100)
    assert sum(name.startswith("small") for name in cache.names()) == 15


def test_what_was_evicted_comes_back_with_its_history_and_what_was_discarded_does_not():
    policy = ValuePolicy()
    candidate = Candidate(ChunkKey(b"a"), 100, 100)
    policy.record_use(candidate)
    policy.add(candidate)
    policy.remove(candidate.key, is_evicted=True)
    policy.record_use(candidate)
    assert policy._past[candidate.key].num_uses == 2
    policy.add(candidate)
    policy.remove(candidate.key, is_evicted=False)
    policy.record_use(candidate)
    assert policy._past[candidate.key].num_uses == 1


@pytest.mark.parametrize("memory", ["_past", "_ghosts"])
def test_a_removal_that_comes_behind_an_eviction_takes_the_history_too(memory, make_entry):
    entry, *others = (make_entry(seed) for seed in range(5))
    capacity_bytes = 4 * entry.num_bytes
    policy = ValuePolicy() if memory == "_past" else S3FifoPolicy(capacity_bytes)
    tier = HostTier(capacity_bytes, policy)
    for each in (entry, *others, *others[-1:] * 9):
        tier.put(each).release()
    assert not tier.contains(entry.key)
    assert entry.key in getattr(policy, memory)
    assert not tier.discard(entry.key)
    assert entry.key not in getattr(policy, memory)
    tier.check_integrity()


def test_the_history_is_bounded_and_residents_are_never_forgotten(monkeypatch):
    monkeypatch.setattr(value, "MAX_REMEMBERED", 50)
    cache = Cache(1_000, ValuePolicy())
    for number in range(2_000):
        cache.use(f"{number % 7}")
        cache.use(f"passing{number}")
    assert len(cache.policy._past) == 50
    assert set(cache.policy.residents()) == set(cache.held)
    cache.policy._comings_of_age.sort()
    assert len(cache.policy._comings_of_age) < 2_000 * 4


def test_an_announced_use_is_waited_for_and_lapses():
    now = [0.0]
    policy = ValuePolicy(lambda: now[0])
    cache = Cache(1_000, policy)
    for _ in range(50):
        now[0] += 1
        for name in range(9):
            cache.use(f"popular{name}")
    cache.use("next")
    policy.expect_use(ChunkKey(b"next"), 5.0)
    for number in range(3):
        now[0] += 1
        cache.use(f"popular{number}")
        for turn in range(4):
            cache.use(f"stranger{number}")
            cache.use(f"stranger{number}/{turn}")
    assert "next" in cache.names()
    now[0] += 60
    for number in range(40):
        now[0] += 1
        cache.use(f"new{number % 4}")
    assert ChunkKey(b"next") not in policy._expected


def test_the_rate_index_knows_late_reuse_from_none():
    rates = ReuseRates()
    late, never = ReuseClass.of(1, 400), ReuseClass.of(1, 100)
    for _ in range(50):
        for age in range(NUM_AGES):
            rates.count_reached(never, age)
            if age <= 6:
                rates.count_reached(late, age)
        rates.count_used(late, 6)
    assert rates.index(late, 0) > 5 * rates.index(never, 0)
    assert rates.index(late, 6) > rates.index(late, 0) > rates.index(late, 12)
    before = rates.index(late, 6)
    rates.halve()
    rates.refresh()
    assert 0.8 * before < rates.index(late, 6) < before


def test_ages_and_classes_are_whole():
    assert [age_of(t) for t in (0, 3_999, 4_000, 7_999, AGE_ENDS[-1], 1e15)] == [
        0,
        0,
        1,
        1,
        NUM_AGES - 1,
        NUM_AGES - 1,
    ]
    assert ReuseClass.of(1, 100) != ReuseClass.of(1, 200)
    assert ReuseClass.of(3, 100) == ReuseClass.of(3, 200)
    assert ReuseClass.of(8, 100) == ReuseClass.of(900, 100)


def test_s3_fifo_moves_what_is_reused_on_and_remembers_what_left():
    policy = S3FifoPolicy(1_000)
    cache = Cache(1_000, policy)
    for number in range(10):
        cache.use(f"{number}")
    for _ in range(2):
        cache.use("0")
    cache.use("10")
    assert "0" in cache.names()
    assert "1" not in cache.names()
    assert ChunkKey(b"1") in policy._ghosts
    cache.use("1")
    assert ChunkKey(b"1") in policy._main
    assert ChunkKey(b"0") in policy._main


def test_an_unknown_policy_is_refused():
    with pytest.raises(InvalidValueError, match="value, lru, s3fifo"):
        make_eviction("mru", 1)
