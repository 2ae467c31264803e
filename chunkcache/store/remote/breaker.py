"""A circuit breaker: after a few failures in a row nobody asks for a while, then one tries.

Knows no remote. The pause grows by doubling, and is jittered so that machines which lost the same
server at the same moment don't come back to it at the same moment.
"""

import random
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Final

NUM_FAILURES: Final = 3
FIRST_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 60.0


class BreakerState(StrEnum):
    """Whether calls are made."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """The pause is over and one call is being tried."""


class CircuitBreaker:
    """Counts failures in a row and says who may call. Safe to use from several threads.

    Args:
        num_failures: In a row, that open it.
        clock: Seconds, monotonic.
        jitter: A number from 0 to 1, new with each call.
    """

    def __init__(
        self,
        num_failures: int = NUM_FAILURES,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._lock = threading.Lock()
        self._max_failures = num_failures
        self._clock = clock
        self._jitter = jitter
        self._failures = self._num_pauses = self._num_opened = 0
        self._retry_at = 0.0
        self._state = BreakerState.CLOSED

    @property
    def state(self) -> BreakerState:
        """Its state now."""
        with self._lock:
            return self._state

    @property
    def num_opened(self) -> int:
        """How often it has opened, counted from the closed state."""
        with self._lock:
            return self._num_opened

    @property
    def is_closed(self) -> bool:
        """Whether anybody may call."""
        return self.state is BreakerState.CLOSED

    def wait_s(self) -> float:
        """Seconds until a call may be tried; 0 where one may be made at once."""
        with self._lock:
            is_closed = self._state is BreakerState.CLOSED
            return 0.0 if is_closed else max(0.0, self._retry_at - self._clock())

    def may_call(self) -> bool:
        """Whether to call now. Who is told so says afterwards how it went."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return True
            if self._state is BreakerState.HALF_OPEN or self._clock() < self._retry_at:
                return False
            self._state = BreakerState.HALF_OPEN
            return True

    def note_success(self) -> None:
        """A call got an answer."""
        with self._lock:
            self._state = BreakerState.CLOSED
            self._failures = self._num_pauses = 0

    def note_failure(self) -> None:
        """A call got none."""
        with self._lock:
            self._failures += 1
            if self._state is BreakerState.CLOSED and self._failures < self._max_failures:
                return
            if self._state is BreakerState.CLOSED:
                self._num_opened += 1
            pause_s = min(FIRST_PAUSE_S * 2**self._num_pauses, MAX_PAUSE_S)
            self._num_pauses = min(self._num_pauses + 1, 30)
            self._retry_at = self._clock() + pause_s * (0.5 + self._jitter() / 2)
            self._state = BreakerState.OPEN
