"""Which of the runtimes over one open store is current, and who may change that."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from chunkcache.errors import DrainingError, ReloadInProgressError
from chunkcache.results import ReloadResult

if TYPE_CHECKING:
    from chunkcache.runtime import Runtime


class Follower(Protocol):
    """What is built over the current runtime."""

    def follow(self) -> None:
        """Let go of a runtime that is not current any more."""
        ...


class Succession:
    """The runtimes over one open store.

    Attributes:
        current: The one that takes requests; changed inside :meth:`reloading` alone.
    """

    def __init__(self, first: "Runtime") -> None:
        self.current = first
        self._lock = threading.Lock()
        self._is_closed = False
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._followers_lock = threading.Lock()

    def add_follower(self, follower: Follower) -> None:
        """Have something told when another runtime is current, for as long as it lives."""
        with self._followers_lock:
            self._followers.add(follower)
        follower.follow()  # what was current when it was built may not be any more

    def tell_followers(self) -> None:
        """Have everything that follows let go of what is not current: an idle tenant would not."""
        with self._followers_lock:
            followers = list(self._followers)
        for follower in followers:
            follower.follow()

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


def reload_result(old: "Runtime", new: "Runtime", num_dropped: int) -> ReloadResult:
    """What a reload came to; ``num_dropped`` entries of the old model went from RAM."""
    runner = new.model.runner
    return ReloadResult(
        changed=new is not old,
        model=runner.name,
        digest=runner.digest.hex(),
        previous_digest=old.model.runner.digest.hex(),
        dropped_entries=num_dropped,
        full_only=new.gate.full_only,
    )
