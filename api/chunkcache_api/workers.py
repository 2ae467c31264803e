"""Blocking work for the event loop: a thread per request that always ends.

A worker produces events on a thread of its own; a coroutine reads them. Cancelling is one call
that needs no loop and no task. Knows nothing of HTTP or of what is produced.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from chunkcache.errors import DrainingError, QueueFullError, RequestCancelledError

Event = Any
"""Whatever a producer emits."""


class Cancellable(Protocol):
    """What can be stopped from another thread; harmless after its end."""

    def cancel(self) -> None:
        """Stop."""
        ...


class WorkerScope:
    """The producing side's view of its worker.

    Args:
        emit: Hands an event to the reader; never blocks.
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self.emit = emit
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._current: Cancellable | None = None

    def attach(self, work: Cancellable) -> None:
        """Have ``work`` cancelled with the worker; it takes the place of what was attached before.

        Raises:
            RequestCancelledError: The worker has been cancelled already; so is ``work`` now.
        """
        with self._lock:
            self._current = work
            is_cancelled = self._is_cancelled
        if is_cancelled:
            work.cancel()
            self.check()

    def check(self) -> None:
        """Between two pieces of work.

        Raises:
            RequestCancelledError: The worker has been cancelled.
        """
        if self._is_cancelled:
            raise RequestCancelledError("the request was cancelled")

    def cancel(self) -> None:
        """Cancel what is attached, now or later."""
        with self._lock:
            self._is_cancelled = True
            current = self._current
        if current is not None:
            current.cancel()


Produce = Callable[[WorkerScope], None]


@dataclass(frozen=True)
class Claim:
    """A bound on the workers that one owner may have alive.

    Attributes:
        owner: Who.
        max_workers: How many.
    """

    owner: str
    max_workers: int


@dataclass(frozen=True)
class _End:
    """The last event: the producer has returned, or raised."""

    error: BaseException | None


class Worker:
    """A producer on a thread of its own. Leaving its context cancels it.

    Read it from one coroutine of the loop it was made on.
    """

    def __init__(self, produce: Produce, on_end: Callable[[], None]) -> None:
        self._produce = produce
        self._on_end = on_end
        self._scope = WorkerScope(self._emit)
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._lock = threading.Lock()
        self._is_read = True
        self._thread = threading.Thread(target=self._run, name="chunkcache-request", daemon=True)
        self._thread.start()

    def __aiter__(self) -> "Worker":
        return self

    async def __anext__(self) -> Event:
        """The next event; the end once the producer has returned.

        Raises:
            Exception: Whatever the producer raised.
        """
        return await self._next(None)

    async def next_within(self, seconds: float) -> Event | None:
        """As ``anext``, or None when nothing has come after so long."""
        return await self._next(seconds)

    def cancel(self) -> None:
        """Ask the producer to end; it does so within one step of what it waits for."""
        self._scope.cancel()

    def join(self) -> None:
        """Wait for the thread's end; not for the event loop's thread."""
        self._thread.join()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()
        with self._lock:
            self._is_read = False

    async def _next(self, seconds: float | None) -> Event | None:
        try:
            async with asyncio.timeout(seconds):
                event = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(event, _End):
            raise StopAsyncIteration if event.error is None else event.error
        return event

    def _emit(self, event: Event) -> None:
        # The reader leaves before its loop closes, and takes this lock to do so.
        with self._lock:
            if self._is_read:
                self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            self._produce(self._scope)
        except BaseException as error:  # handed to the reader
            failure = error
        self._on_end()
        self._emit(_End(failure))


class WorkerPool:
    """Bounds the workers alive, and ends them all.

    Args:
        max_workers: More are refused.
    """

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._lock = threading.Lock()
        self._alive: dict[int, Worker] = {}
        self._num_by_owner: Counter[str] = Counter()
        self._num_started = 0
        self._is_closed = False

    @property
    def num_alive(self) -> int:
        """Workers whose producers have not returned."""
        with self._lock:
            return len(self._alive)

    def start(self, produce: Produce, claims: Sequence[Claim] = ()) -> Worker:
        """Run a producer.

        Args:
            produce: The producer.
            claims: Bounds of those on whose behalf it runs.

        Raises:
            QueueFullError: Too many are alive, or too many of an owner.
            DrainingError: The pool is closed.
        """
        with self._lock:
            if self._is_closed:
                raise DrainingError("the server is stopping")
            if len(self._alive) >= self._max_workers:
                raise QueueFullError(f"{len(self._alive)} requests are in flight; try again later")
            for claim in claims:
                if self._num_by_owner[claim.owner] >= claim.max_workers:
                    raise QueueFullError(
                        f"{claim.max_workers} requests of this {claim.owner.partition(':')[0]} are "
                        "in flight; try again later"
                    )
            self._num_started += 1
            number = self._num_started
            owners = [claim.owner for claim in claims]
            worker = self._alive[number] = Worker(produce, lambda: self._ended(number, owners))
            # Behind the start, which may fail; its end waits for the lock.
            self._num_by_owner.update(owners)
        return worker

    def close(self) -> None:
        """Cancel every worker and wait for their threads; refuse new ones; idempotent."""
        with self._lock:
            self._is_closed = True
            workers = list(self._alive.values())
        for worker in workers:
            worker.cancel()
        for worker in workers:
            worker.join()

    def _ended(self, number: int, owners: Sequence[str]) -> None:
        with self._lock:
            del self._alive[number]
            self._num_by_owner.subtract(owners)
            for owner in owners:
                if not self._num_by_owner[owner]:
                    del self._num_by_owner[owner]
