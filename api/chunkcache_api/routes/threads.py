"""Blocking work of routes on threads, with a bound on how much of it may wait."""

from collections.abc import Callable
from typing import Final, TypeVar

from anyio import CapacityLimiter, to_thread

from chunkcache.errors import QueueFullError

Result = TypeVar("Result")

MAX_WAITING: Final = 64
"""Calls of one kind that may wait for a thread; more are refused."""


async def on_thread(limiter: CapacityLimiter, work: Callable[[], Result]) -> Result:
    """Do work on one of a kind's threads.

    Raises:
        QueueFullError: Too much of its kind waits already.
    """
    if limiter.statistics().tasks_waiting >= MAX_WAITING:
        raise QueueFullError(f"{MAX_WAITING} requests are waiting; try again later")
    return await to_thread.run_sync(work, limiter=limiter)
