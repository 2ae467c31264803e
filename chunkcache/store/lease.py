"""Who holds an entry, and how many bytes are held: leases and the byte ledger.

Neither knows where entries come from or how one is chosen for eviction.
"""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

from chunkcache.entry import Entry
from chunkcache.store.tier import MissReason, NotStored

Source = Literal["host", "disk", "remote", "computed"]


class Lease:
    """The right to read one entry; while it is held the entry is not evicted.

    A lease that is lost without :meth:`release` keeps its entry resident for ever: it errs to a
    leak (visible as an open lease in the stats), never to memory that is reused under a reader.

    Attributes:
        entry: The entry. Its tensors are shared: readers never write to them.
        source: Where this lookup found it.
        miss: Why it had to be computed, if it had to.
        warning: Why it was not kept, if it was computed and not kept.
    """

    def __init__(
        self,
        entry: Entry,
        source: Source,
        on_release: Callable[[], None],
        *,
        miss: MissReason | None = None,
        warning: NotStored | None = None,
    ) -> None:
        self.entry = entry
        self.source: Source = source
        self.miss = miss
        self.warning = warning
        self._lock = threading.Lock()
        self._on_release: Callable[[], None] | None = on_release

    @property
    def is_released(self) -> bool:
        """Whether :meth:`release` has been called."""
        return self._on_release is None

    def release(self) -> None:
        """Give the entry back. Further calls, from any thread, do nothing."""
        with self._lock:
            on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class ByteLedger:
    """A budget of bytes: ``capacity = used + free`` after every call.

    Not locked: its owner serialises the calls.
    """

    def __init__(self, capacity_bytes: int) -> None:
        assert capacity_bytes >= 0, capacity_bytes
        self.capacity_bytes = capacity_bytes
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes taken and not given back."""
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be taken."""
        return self.capacity_bytes - self._used_bytes

    def take(self, num_bytes: int) -> None:
        """Take bytes; the caller has made sure that they are free."""
        assert 0 <= num_bytes <= self.free_bytes, (num_bytes, self.free_bytes)
        self._used_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Return bytes that were taken."""
        assert 0 <= num_bytes <= self._used_bytes, (num_bytes, self._used_bytes)
        self._used_bytes -= num_bytes

    def check_integrity(self, held_bytes: int) -> None:
        """Compare with what the owner really holds.

        Args:
            held_bytes: Sum of the owner's holdings, counted one by one.

        Raises:
            AssertionError: The ledger and the holdings differ, or the budget is exceeded.
        """
        assert held_bytes == self._used_bytes, (held_bytes, self._used_bytes)
        assert 0 <= self._used_bytes <= self.capacity_bytes, self._used_bytes
