"""Calls to a backend within a hard time, behind a circuit breaker, counted.

Knows no entries. A client library's own timeouts are often per step of a call: the caller's wait
is bounded here, whatever the library does.
"""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from chunkcache.store.remote.backend import Backend, FailureKind, RemoteFailure
from chunkcache.store.remote.breaker import CircuitBreaker

ResultT = TypeVar("ResultT")
NUM_THREADS: Final = 4
"""Calls at a time; one that the library does not end keeps its thread until it does."""


class RemoteCalls:
    """Makes calls on threads of its own.

    Args:
        backend: Whom to call.
        timeout_s: Seconds after which a caller stops waiting.
        breaker: Of these calls alone.
    """

    def __init__(self, backend: Backend, timeout_s: float, breaker: CircuitBreaker) -> None:
        self._backend = backend
        self._timeout_s = timeout_s
        self.breaker = breaker
        self._lock = threading.Lock()
        self._failures: Counter[FailureKind] = Counter()
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="remote")

    def call(self, work: Callable[[Backend], ResultT]) -> ResultT:
        """Do something with the backend.

        Raises:
            RemoteFailure: It failed, took too long, or the breaker did not let it through.
            Exception: Whatever else ``work`` raises.
        """
        if not self.breaker.may_call():
            raise RemoteFailure(FailureKind.UNREACHABLE)
        try:
            result = self._within_time(work)
        except RemoteFailure as error:
            with self._lock:
                self._failures[error.kind] += 1
            self.breaker.note_failure()
            raise
        except BaseException:
            self.breaker.note_success()  # it was reached
            raise
        self.breaker.note_success()
        return result

    def failures(self) -> dict[FailureKind, int]:
        """Calls that failed, by kind; those that the breaker stopped are not among them."""
        with self._lock:
            return dict(self._failures)

    def close(self) -> None:
        """Start no call any more; one under way ends by its library's own timeout."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _within_time(self, work: Callable[[Backend], ResultT]) -> ResultT:
        try:
            future = self._pool.submit(work, self._backend)
        except RuntimeError:  # closed meanwhile
            raise RemoteFailure(FailureKind.UNREACHABLE) from None
        try:
            return future.result(timeout=self._timeout_s)
        except TimeoutError:
            future.cancel()
            raise RemoteFailure(FailureKind.TIMEOUT) from None
