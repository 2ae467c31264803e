"""Work for when nobody waits: a bounded backlog of generators, advanced one step at a time.

Knows neither requests nor models. What it holds is lost when the engine stops.
"""

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

import structlog

from chunkcache.failure_logs import traceback_text

IdleWork = Callable[[], Generator[None, None, None]]
"""Begins a piece of work. It may be begun again after it was closed half-way."""

_log = structlog.get_logger("chunkcache.engine")


@dataclass(frozen=True)
class IdleCounts:
    """A snapshot of an idle lane.

    Attributes:
        waiting: Pieces of work not done yet, the one under way included.
        dropped: Pieces thrown away: the backlog was full, or the engine stopped.
        failed: Pieces that raised.
    """

    waiting: int
    dropped: int
    failed: int


class IdleLane:
    """Runs work step by step. Only for one thread, apart from :meth:`counts`.

    Args:
        max_waiting: Length of the backlog; beyond it the oldest work is dropped.
    """

    def __init__(self, max_waiting: int) -> None:
        assert max_waiting >= 1, max_waiting
        self._max_waiting = max_waiting
        self._backlog: deque[IdleWork] = deque()
        self._steps: Generator[None, None, None] | None = None
        self._num_dropped = self._num_failed = 0

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` would do anything."""
        return bool(self._backlog)

    def counts(self) -> IdleCounts:
        """A snapshot, from any thread."""
        return IdleCounts(len(self._backlog), self._num_dropped, self._num_failed)

    def add(self, work: IdleWork) -> None:
        """Append to the backlog; where it is full, what has waited longest goes."""
        self._backlog.append(work)
        while len(self._backlog) > self._max_waiting:
            self.give_way()
            self._backlog.popleft()
            self._num_dropped += 1

    def step(self) -> None:
        """Advance the work at the head of the backlog, which begins with its first step."""
        try:
            if self._steps is None:
                self._steps = self._backlog[0]()
            next(self._steps)
        except StopIteration:
            self._end()
        except Exception as error:  # one piece of work fails, the lane goes on
            self._end()
            self._num_failed += 1
            _log.error("idle_work_failed", exception=traceback_text(error))

    def give_way(self) -> bool:
        """Have the work under way give back all it holds; it begins anew at its next turn.

        Returns:
            Whether any was under way.
        """
        steps, self._steps = self._steps, None
        if steps is None:
            return False
        steps.close()
        return True

    def clear(self) -> None:
        """Drop everything."""
        self.give_way()
        self._num_dropped += len(self._backlog)
        self._backlog.clear()

    def _end(self) -> None:
        self._backlog.popleft()
        self._steps = None
