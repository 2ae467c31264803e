"""Entries that callers have asked to keep for a time, and the share of a budget they may take.

Knows neither entries nor leases. Not locked: its owner serialises the calls, and removes a pin when
the entry goes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from chunkcache.errors import PinLimitError
from chunkcache.identity import ChunkKey


@dataclass(frozen=True)
class _Pin:
    num_bytes: int
    ends_at_s: float


class Pins:
    """Pins of one tier.

    Args:
        max_bytes: What pinned entries may occupy together.
        clock: Seconds.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._pins: dict[ChunkKey, _Pin] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of what is pinned now."""
        self.expire()
        return self._num_bytes

    def __contains__(self, key: ChunkKey) -> bool:
        pin = self._pins.get(key)
        return pin is not None and pin.ends_at_s > self._clock()

    def __iter__(self) -> Iterator[ChunkKey]:
        """What is pinned, as of the last :meth:`expire`."""
        return iter(self._pins)

    def check_room(self, key: ChunkKey, num_bytes: int) -> None:
        """See whether an entry may be pinned.

        Raises:
            PinLimitError: Not within the bytes that pins may occupy.
        """
        self.expire()
        if key not in self._pins and self._num_bytes + num_bytes > self._max_bytes:
            raise PinLimitError(
                f"pins may hold {self._max_bytes} bytes and hold {self._num_bytes}; "
                f"{num_bytes} more do not fit"
            )

    def add(self, key: ChunkKey, num_bytes: int, ttl_s: float) -> None:
        """Pin an entry, or lengthen its pin."""
        ends_at_s = self._clock() + ttl_s
        before = self._pins.get(key)
        if before is None:
            self._num_bytes += num_bytes
        else:
            ends_at_s = max(ends_at_s, before.ends_at_s)
        self._pins[key] = _Pin(num_bytes, ends_at_s)

    def remove(self, key: ChunkKey) -> bool:
        """End a pin; says whether there was one."""
        pin = self._pins.pop(key, None)
        if pin is not None:
            self._num_bytes -= pin.num_bytes
        return pin is not None

    def expire(self) -> None:
        """End the pins whose time is over."""
        now_s = self._clock()
        for key in [key for key, pin in self._pins.items() if pin.ends_at_s <= now_s]:
            self.remove(key)

    def check_integrity(self, resident_bytes: Mapping[ChunkKey, int]) -> None:
        """Compare with the residents.

        Raises:
            AssertionError: A pin is on nothing, or its bytes are other than the entry's.
        """
        assert all(resident_bytes[k] == pin.num_bytes for k, pin in self._pins.items())
        assert self._num_bytes == sum(pin.num_bytes for pin in self._pins.values())
        assert 0 <= self._num_bytes <= self._max_bytes
