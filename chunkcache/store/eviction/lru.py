"""Least recently used out first; everybody is let in. The simplest baseline."""

from collections import OrderedDict
from collections.abc import Iterable

from chunkcache.identity import ChunkKey
from chunkcache.store.eviction.policy import Candidate, EvictionPolicy, MayEvict


class LruPolicy(EvictionPolicy):
    """Residents in the order of their last use."""

    def __init__(self) -> None:
        self._num_bytes: OrderedDict[ChunkKey, int] = OrderedDict()

    def record_use(self, candidate: Candidate) -> None:
        """Make a resident the most recently used."""
        if candidate.key in self._num_bytes:
            self._num_bytes.move_to_end(candidate.key)

    def victims(
        self, newcomer: Candidate, needed_bytes: int, may_evict: MayEvict, *, must_admit: bool
    ) -> list[ChunkKey]:
        """The residents used longest ago."""
        chosen: list[ChunkKey] = []
        for key, num_bytes in self._num_bytes.items():
            if needed_bytes <= 0:
                break
            if may_evict(key):
                chosen.append(key)
                needed_bytes -= num_bytes
        assert needed_bytes <= 0, "what may be evicted does not suffice"
        return chosen

    def add(self, candidate: Candidate) -> None:
        """The newest is the most recently used."""
        self._num_bytes[candidate.key] = candidate.num_bytes

    def remove(self, key: ChunkKey, *, is_evicted: bool) -> None:
        """Forget a resident; an evicted one leaves no trace either."""
        del self._num_bytes[key]

    def residents(self) -> Iterable[ChunkKey]:
        """From the least to the most recently used."""
        return self._num_bytes.keys()
