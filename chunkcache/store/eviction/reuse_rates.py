"""How soon entries are used again, learned from the uses of all: rates by class and age.

For each class (how often an entry was used, and for rarely used ones its size) and each stretch of
age since the last use, count how many entries reached it and how many were used within it. From
these follows an index: the largest rate of uses that keeping the entry for some further time can
give, the Gittins index (Gittins, "Bandit processes and dynamic allocation indices", 1979). Unlike the
rate at the present age it is right for reuse that comes late, as between the turns of a conversation.

Classes with few observations lean on wider ones: a size on its number of uses, that on the next
lower number. Knows neither keys nor bytes.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from math import log2

FIRST_AGE = 4_000.0
"""End of the first stretch, in tokens looked up; each further one is twice as long."""
NUM_AGES = 19
AGE_ENDS = tuple(FIRST_AGE * 2.0**i for i in range(NUM_AGES - 1))
_WIDTHS = (FIRST_AGE, *AGE_ENDS)
_MAX_USES_LEVEL = 6
_USES_WITH_SIZE = 2
_LEVELS_PER_DOUBLING = 2
_SHRINK = 4.0
"""Observations that what a class leans on counts for."""
_FIRST_GUESS = 0.3
"""Chance to be used within a stretch of age, before anything was seen."""

_NO_SIZE = -1


@dataclass(frozen=True)
class ReuseClass:
    """Entries that are expected to be used alike.

    Attributes:
        uses_level: Half doublings of the number of uses, up to 8 uses.
        size_level: Half doublings of the tokens; -1 from three uses on, where size tells little.
    """

    uses_level: int
    size_level: int

    @classmethod
    def of(cls, num_uses: int, num_tokens: int) -> "ReuseClass":
        """The class of an entry."""
        level = min(int(log2(num_uses) * _LEVELS_PER_DOUBLING), _MAX_USES_LEVEL)
        has_size = num_uses <= _USES_WITH_SIZE
        return cls(level, int(log2(num_tokens) * _LEVELS_PER_DOUBLING) if has_size else _NO_SIZE)


@dataclass
class _Counts:
    used: list[float] = field(default_factory=lambda: [0.0] * NUM_AGES)
    reached: list[float] = field(default_factory=lambda: [0.0] * NUM_AGES)

    def chances(self, guess: list[float]) -> list[float]:
        return [
            (used + _SHRINK * guessed) / (reached + _SHRINK)
            for used, reached, guessed in zip(self.used, self.reached, guess, strict=True)
        ]

    def halve(self) -> None:
        self.used = [count / 2 for count in self.used]
        self.reached = [count / 2 for count in self.reached]


def age_of(ticks: float) -> int:
    """Which stretch of age so many ticks are in."""
    return bisect_right(AGE_ENDS, ticks)


class ReuseRates:
    """Counts, and the index that follows from them. Ticks are tokens looked up."""

    def __init__(self) -> None:
        self._by_class: dict[ReuseClass, _Counts] = {}
        self._by_level = [_Counts() for _ in range(_MAX_USES_LEVEL + 1)]
        self._index: dict[ReuseClass, list[float]] = {}

    def count_reached(self, reuse_class: ReuseClass, age: int) -> None:
        """An entry of the class has come to an age without being used."""
        for counts in self._counts_of(reuse_class):
            counts.reached[age] += 1

    def count_used(self, reuse_class: ReuseClass, age: int) -> None:
        """An entry of the class was used again at an age."""
        for counts in self._counts_of(reuse_class):
            counts.used[age] += 1

    def refresh(self) -> None:
        """Have :meth:`index` look at what was counted since."""
        self._index.clear()

    def halve(self) -> None:
        """Let the past count half as much, so that a change of habits is followed."""
        for counts in (*self._by_class.values(), *self._by_level):
            counts.halve()

    def index(self, reuse_class: ReuseClass, age: int) -> float:
        """The best rate of uses per tick that an entry of this class and age promises."""
        found = self._index.get(reuse_class)
        if found is None:
            found = self._index[reuse_class] = _best_rates(self._chances(reuse_class))
        return found[age]

    def _counts_of(self, reuse_class: ReuseClass) -> list[_Counts]:
        counts = [self._by_level[reuse_class.uses_level]]
        if reuse_class.size_level != _NO_SIZE:
            counts.append(self._by_class.setdefault(reuse_class, _Counts()))
        return counts

    def _chances(self, reuse_class: ReuseClass) -> list[float]:
        chances = [_FIRST_GUESS] * NUM_AGES
        for level in range(reuse_class.uses_level + 1):
            chances = self._by_level[level].chances(chances)
        own = self._by_class.get(reuse_class)
        return own.chances(chances) if own else chances


def _best_rates(chances: list[float]) -> list[float]:
    """By age, the largest expected uses per tick kept over all times of giving up."""
    best_rates: list[float] = []
    for first in range(NUM_AGES):
        best = uses = ticks = 0.0
        still_there = 1.0
        for chance, width in zip(chances[first:], _WIDTHS[first:], strict=True):
            uses += still_there * chance
            ticks += still_there * width * (1 - chance / 2)
            still_there *= 1 - chance
            best = max(best, uses / ticks)
        best_rates.append(best)
    return best_rates
