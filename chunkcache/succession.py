"""Which of the runtimes over one open store is current, and who may change that."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from chunkcache.errors import DrainingError, ReloadInProgressError

if TYPE_CHECKING:
    from chunkcache.runtime import Runtime


class Succession:
    """The runtimes over one open store.

    Attributes:
        current: The one that takes requests; changed inside :meth:`reloading` alone.
    """

    def __init__(self, first: "Runtime") -> None:
        self.current = first
        self._lock = threading.Lock()
        self._is_closed = False

    @contextmanager
    def reloading(self) -> Iterator["Succession"]:
        """Nobody else reloads or closes inside.

        Raises:
            ReloadInProgressError: Somebody is about to.
            DrainingError: The store is closed.
        """
        if not self._lock.acquire(blocking=False):
            raise ReloadInProgressError("the model is being reloaded already")
        try:
            if self._is_closed:
                raise DrainingError("the runtime is closed")
            yield self
        finally:
            self._lock.release()

    @contextmanager
    def closing(self) -> Iterator["Succession"]:
        """Behind a reload that is under way; none begins afterwards."""
        with self._lock:
            self._is_closed = True
            yield self
