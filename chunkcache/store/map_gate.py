"""Who is using the memory map of this process, so that it is replaced only when nobody is.

LMDB replaces the map under open transactions without a word; every buffer read from them would
then point at memory that is gone. This module knows threads, not LMDB.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from chunkcache.errors import StoreError


class MapGate:
    """Many users, or one replacer; a waiting replacer goes before new users.

    Args:
        timeout_s: How long a replacer waits for users to leave.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._condition = threading.Condition()
        self._users: set[int] = set()
        self._is_replacing = False

    @property
    def num_users(self) -> int:
        """Threads inside a transaction."""
        with self._condition:
            return len(self._users)

    @property
    def is_replacing(self) -> bool:
        """Whether somebody replaces the map, or waits to."""
        with self._condition:
            return self._is_replacing

    def enter(self) -> int:
        """Begin to use the map.

        Returns:
            A receipt for :meth:`leave`.

        Raises:
            AssertionError: This thread uses it already. Transactions do not nest: a thread inside
                one would wait for itself when the map has to grow.
        """
        user = threading.get_ident()
        with self._condition:
            assert user not in self._users, "a transaction was begun inside another one"
            self._condition.wait_for(lambda: not self._is_replacing)
            self._users.add(user)
        return user

    def leave(self, user: int) -> None:
        """Stop using the map; ``user`` is the receipt that :meth:`enter` gave."""
        with self._condition:
            self._users.remove(user)
            self._condition.notify_all()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Wait until nobody uses the map, and keep everybody out meanwhile.

        Raises:
            StoreError: A transaction stayed open longer than the timeout.
        """
        with self._condition:
            assert threading.get_ident() not in self._users, "a transaction is open in this thread"
            self._condition.wait_for(lambda: not self._is_replacing)
            self._is_replacing = True
            is_free = self._condition.wait_for(lambda: not self._users, self._timeout_s)
            if not is_free:
                self._is_replacing = False
                self._condition.notify_all()
        if not is_free:
            raise StoreError(
                f"the store's map could not be replaced: a transaction has been open for more than "
                f"{self._timeout_s:g} s"
            )
        try:
            yield
        finally:
            with self._condition:
                self._is_replacing = False
                self._condition.notify_all()
