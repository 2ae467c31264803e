"""The default: value = saved compute x expected reuse / bytes, with admission and a history.

Expected reuse is learned (:mod:`chunkcache.store.eviction.reuse_rates`) from the uses of every
entry met lately, resident or not, so that an entry which comes back is not a stranger. Entries of
one class wait in the order of their last use, and the least valuable of all is one of the heads: an
eviction looks at as many entries as there are classes. A newcomer that is worth less than what it
would push out is not let in.
"""

import heapq
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from chunkcache.identity import ChunkKey
from chunkcache.store.eviction.policy import Candidate, EvictionPolicy, MayEvict
from chunkcache.store.eviction.reuse_rates import (
    AGE_ENDS,
    FIRST_AGE,
    ReuseClass,
    ReuseRates,
    age_of,
)

MAX_REMEMBERED = 1 << 17
"""Entries whose uses are remembered, residents included."""
MAX_EXPECTED = 4_096
"""Entries whose next use a caller has announced."""
_REFRESH_EVERY = 64
_HALVE_EVERY = 1 << 18
_SPEED_MEMORY_S = 60.0
_WEIGHTS_PER_DOUBLING = 4

_Queue = tuple[ReuseClass, int]
"""Class and weight level; one queue holds entries whose values differ by their age alone."""


@dataclass
class _Past:
    """What is remembered of an entry.

    Attributes:
        candidate: As it was last seen.
        num_uses: Uses so far.
        used_at: Tick of the last use.
        queue: Where it waits while it is resident.
        is_resident: Whether the tier holds it.
    """

    candidate: Candidate
    num_uses: int
    used_at: float
    queue: _Queue
    is_resident: bool = False


@dataclass(frozen=True)
class _Expected:
    """An announced use.

    Attributes:
        at_s: When, on the policy's clock.
        lapses_at_s: When it is believed no longer.
    """

    at_s: float
    lapses_at_s: float


class ValuePolicy(EvictionPolicy):
    """The default policy.

    Args:
        clock: Seconds; only announced uses look at it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rates = ReuseRates()
        self._past: OrderedDict[ChunkKey, _Past] = OrderedDict()
        self._queues: dict[_Queue, OrderedDict[ChunkKey, _Past]] = {}
        self._comings_of_age: list[tuple[float, ChunkKey, float, int]] = []
        self._expected: OrderedDict[ChunkKey, _Expected] = OrderedDict()
        self._ticks = 0.0
        self._ticks_per_s = 0.0
        self._last_use_s = clock()
        self._num_uses = 0

    def record_use(self, candidate: Candidate) -> None:
        """Learn from a use, and move the entry to where it belongs now."""
        self._advance(candidate.saved_tokens)
        key = candidate.key
        past = self._past.pop(key, None)
        num_uses, is_resident = 1, False
        if past is not None:
            self._rates.count_used(past.queue[0], age_of(self._ticks - past.used_at))
            num_uses, is_resident = past.num_uses + 1, past.is_resident
            if is_resident:
                del self._queues[past.queue][key]
        queue = (ReuseClass.of(num_uses, candidate.saved_tokens), _weight_level(candidate))
        past = _Past(candidate, num_uses, self._ticks, queue, is_resident)
        self._past[key] = past
        self._rates.count_reached(queue[0], 0)
        self._wait_for_age(key, past, 1)
        if is_resident:
            self._queues.setdefault(queue, OrderedDict())[key] = past
        self._expected.pop(key, None)
        self._forget_oldest()

    def victims(
        self, newcomer: Candidate, needed_bytes: int, may_evict: MayEvict, *, must_admit: bool
    ) -> list[ChunkKey] | None:
        """The least valuable residents, as long as the newcomer is worth as much as each."""
        now_s = self._clock()
        own = math.inf if must_admit else self._value(self._past_of(newcomer), now_s)
        heads: dict[Iterator[tuple[float, ChunkKey, int]], tuple[float, ChunkKey, int]] = {}
        for line in self._lines(may_evict, now_s):
            if (head := next(line, None)) is not None:
                heads[line] = head
        chosen: list[ChunkKey] = []
        while needed_bytes > 0:
            assert heads, "what may be evicted does not suffice"
            line = min(heads, key=lambda line: heads[line][0])
            value, key, num_bytes = heads[line]
            if value > own:
                return None
            chosen.append(key)
            needed_bytes -= num_bytes
            if (head := next(line, None)) is not None:
                heads[line] = head
            else:
                del heads[line]
        return chosen

    def add(self, candidate: Candidate) -> None:
        """Begin to value an entry as a resident."""
        past = self._past_of(candidate)
        past.is_resident = True
        self._queues.setdefault(past.queue, OrderedDict())[candidate.key] = past

    def restore(self, candidate: Candidate, num_uses: int) -> None:
        """Go on from earlier uses. They teach nothing of ages: when they were is not known."""
        if candidate.key not in self._past:
            self._advance(candidate.saved_tokens)
            queue = (ReuseClass.of(num_uses, candidate.saved_tokens), _weight_level(candidate))
            self._past[candidate.key] = _Past(candidate, num_uses, self._ticks, queue)
        self.add(candidate)

    def remove(self, key: ChunkKey, *, is_evicted: bool) -> None:
        """Keep or forget the history of what goes."""
        past = self._past[key]
        past.is_resident = False
        del self._queues[past.queue][key]
        if not is_evicted:
            self.forget(key)

    def forget(self, key: ChunkKey) -> None:
        """Forget uses, past and announced."""
        self._past.pop(key, None)
        self._expected.pop(key, None)

    def expect_use(self, key: ChunkKey, in_seconds: float) -> None:
        """Value an entry by its announced use, until that has come or is long overdue."""
        now_s = self._clock()
        self._expected.pop(key, None)
        self._expected[key] = _Expected(now_s + in_seconds, now_s + 2 * in_seconds + 1.0)
        if len(self._expected) > MAX_EXPECTED:
            self._expected.popitem(last=False)

    def residents(self) -> Iterable[ChunkKey]:
        """Queue by queue."""
        return [key for queue in self._queues.values() for key in queue]

    def _past_of(self, candidate: Candidate) -> _Past:
        if candidate.key not in self._past:
            self.record_use(candidate)
        return self._past[candidate.key]

    def _advance(self, num_ticks: int) -> None:
        self._ticks += num_ticks
        self._num_uses += 1
        now_s = self._clock()
        faded = math.exp(-max(0.0, now_s - self._last_use_s) / _SPEED_MEMORY_S)
        self._ticks_per_s = self._ticks_per_s * faded + num_ticks / _SPEED_MEMORY_S
        self._last_use_s = now_s
        waiting = self._comings_of_age
        while waiting and waiting[0][0] <= self._ticks:
            _, key, used_at, age = heapq.heappop(waiting)
            past = self._past.get(key)
            if past is not None and past.used_at == used_at:
                self._rates.count_reached(past.queue[0], age)
                self._wait_for_age(key, past, age + 1)
        if self._num_uses % _HALVE_EVERY == 0:
            self._rates.halve()
        if self._num_uses % _REFRESH_EVERY == 0:
            self._rates.refresh()

    def _wait_for_age(self, key: ChunkKey, past: _Past, age: int) -> None:
        if age <= len(AGE_ENDS):
            comes_at = past.used_at + AGE_ENDS[age - 1]
            heapq.heappush(self._comings_of_age, (comes_at, key, past.used_at, age))

    def _forget_oldest(self) -> None:
        for _ in range(len(self._past) - MAX_REMEMBERED):
            key, past = next(iter(self._past.items()))
            if past.is_resident:
                self._past.move_to_end(key)
            else:
                del self._past[key]

    def _lines(
        self, may_evict: MayEvict, now_s: float
    ) -> Iterator[Iterator[tuple[float, ChunkKey, int]]]:
        """Iterators over value, key and bytes, each in ascending order of value."""
        announced: list[tuple[float, ChunkKey, int]] = []
        for key, expected in list(self._expected.items()):
            past = self._past.get(key)
            if expected.lapses_at_s < now_s:
                del self._expected[key]
            elif past is not None and past.is_resident and may_evict(key):
                announced.append((self._value(past, now_s), key, past.candidate.num_bytes))
        yield iter(sorted(announced))
        for queue in self._queues.values():
            yield self._line(queue, may_evict)

    def _line(
        self, queue: OrderedDict[ChunkKey, _Past], may_evict: MayEvict
    ) -> Iterator[tuple[float, ChunkKey, int]]:
        for key, past in queue.items():
            if key not in self._expected and may_evict(key):
                yield self._learned_value(past), key, past.candidate.num_bytes

    def _value(self, past: _Past, now_s: float) -> float:
        expected = self._expected.get(past.candidate.key)
        if expected is None or expected.lapses_at_s < now_s:
            return self._learned_value(past)
        ticks_left = max(0.0, expected.at_s - now_s) * self._ticks_per_s
        # What is due now is worth what is surely used within the first stretch of age.
        return _weight(past.queue[1]) / max(ticks_left, FIRST_AGE / 2)

    def _learned_value(self, past: _Past) -> float:
        reuse_class, weight_level = past.queue
        age = age_of(self._ticks - past.used_at)
        return _weight(weight_level) * self._rates.index(reuse_class, age)


def _weight_level(candidate: Candidate) -> int:
    return round(_WEIGHTS_PER_DOUBLING * math.log2(candidate.saved_tokens / candidate.num_bytes))


def _weight(level: int) -> float:
    return 2.0 ** (level / _WEIGHTS_PER_DOUBLING)
