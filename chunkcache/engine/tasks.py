"""Work that somebody waits for beside requests: one task after the other, a step at a time.

Knows neither requests nor models.
"""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TypeVar

Task = Callable[[], Generator[None, None, None] | None]
"""Begins a task: does all of it, or returns its steps."""

Result = TypeVar("Result")


class TaskLane:
    """Runs tasks step by step, in the order in which they came. Only for one thread."""

    def __init__(self) -> None:
        self._waiting: deque[Task] = deque()
        self._steps: Generator[None, None, None] | None = None

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` would do anything."""
        return bool(self._waiting) or self._steps is not None

    def add(self, task: Task) -> None:
        """Append a task; it must not raise."""
        self._waiting.append(task)

    def step(self) -> None:
        """Advance the task at hand, or begin the next one."""
        if self._steps is None and self._waiting:
            self._steps = self._waiting.popleft()()
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None


def promised(task: Callable[[], Result]) -> "tuple[Task, Future[Result]]":
    """A callable as a task, and the future of what it returns or raises."""
    future: Future[Result] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(task())
        except BaseException as error:  # handed to whoever waits for the future
            future.set_exception(error)

    return run, future


def promised_steps(
    task: Callable[[], Generator[None, None, Result]],
) -> "tuple[Task, Future[Result]]":
    """Like :func:`promised`, for work that has steps."""
    future: Future[Result] = Future()

    def run() -> Generator[None, None, None]:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result((yield from task()))
        except BaseException as error:  # handed to whoever waits for the future
            future.set_exception(error)

    return run, future
