"""S3-FIFO: a small queue on probation, a main queue, and the ghosts of what left the first.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. Queues are measured in
bytes here, since entries differ in size. Everybody is let in.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from chunkcache.identity import ChunkKey
from chunkcache.store.eviction.policy import Candidate, EvictionPolicy, MayEvict

_SMALL_SHARE = 0.1
_MAX_USES = 3
_USES_TO_MOVE = 2


@dataclass
class _Item:
    num_bytes: int
    num_uses: int = 0


class _Fifo(OrderedDict[ChunkKey, _Item]):
    """A queue that knows its bytes."""

    num_bytes = 0

    def push(self, key: ChunkKey, item: _Item) -> None:
        self[key] = item
        self.num_bytes += item.num_bytes

    def take(self, key: ChunkKey) -> _Item:
        item = self.pop(key)
        self.num_bytes -= item.num_bytes
        return item


class S3FifoPolicy(EvictionPolicy):
    """The published policy.

    Args:
        capacity_bytes: The tier's budget; a tenth of it is on probation.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._small_bytes = int(capacity_bytes * _SMALL_SHARE)
        self._ghost_bytes = capacity_bytes - self._small_bytes
        self._small, self._main, self._ghosts = _Fifo(), _Fifo(), _Fifo()

    def record_use(self, candidate: Candidate) -> None:
        """Count a use of a resident, up to three."""
        item = self._small.get(candidate.key) or self._main.get(candidate.key)
        if item is not None:
            item.num_uses = min(item.num_uses + 1, _MAX_USES)

    def victims(
        self, newcomer: Candidate, needed_bytes: int, may_evict: MayEvict, *, must_admit: bool
    ) -> list[ChunkKey]:
        """Heads of the queues; what was used meanwhile moves on to the main queue's end."""
        chosen: dict[ChunkKey, None] = {}
        freed_from_small = 0
        while needed_bytes > 0:
            small_bytes = self._small.num_bytes - freed_from_small
            from_small = small_bytes > self._small_bytes
            key = self._next_victim(from_small, chosen, may_evict)
            if key is None:
                key = self._next_victim(not from_small, chosen, may_evict)
            assert key is not None, "what may be evicted does not suffice"
            item = self._small.get(key)
            freed_from_small += item.num_bytes if item else 0
            needed_bytes -= (item or self._main[key]).num_bytes
            chosen[key] = None
        return list(chosen)

    def add(self, candidate: Candidate) -> None:
        """On probation, unless it left not long ago."""
        was_here = candidate.key in self._ghosts
        if was_here:
            self._ghosts.take(candidate.key)
        queue = self._main if was_here else self._small
        queue.push(candidate.key, _Item(candidate.num_bytes))

    def remove(self, key: ChunkKey, *, is_evicted: bool) -> None:
        """What was evicted on probation leaves a ghost."""
        if key in self._main:
            self._main.take(key)
            return
        item = self._small.take(key)
        if is_evicted:
            self._ghosts.push(key, item)
            while self._ghosts.num_bytes > self._ghost_bytes:
                self._ghosts.take(next(iter(self._ghosts)))

    def forget(self, key: ChunkKey) -> None:
        """Forget that it was here."""
        if key in self._ghosts:
            self._ghosts.take(key)

    def residents(self) -> Iterable[ChunkKey]:
        """On probation, then main; the oldest first."""
        return [*self._small, *self._main]

    def _next_victim(
        self, from_small: bool, chosen: dict[ChunkKey, None], may_evict: MayEvict
    ) -> ChunkKey | None:
        queue = self._small if from_small else self._main
        # An item of the main queue comes round once per use, and once more to go.
        for _ in range((_MAX_USES + 1) * len(queue)):
            key = next((k for k in queue if k not in chosen), None)
            if key is None:
                return None
            item = queue[key]
            if not may_evict(key):
                queue.move_to_end(key)
            elif from_small and item.num_uses >= _USES_TO_MOVE:
                self._main.push(key, _Item(self._small.take(key).num_bytes))
            elif not from_small and item.num_uses:
                item.num_uses -= 1
                queue.move_to_end(key)
            else:
                return key
        return None
