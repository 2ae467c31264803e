"""Tasks: one after the other, a step at a time, in turn with requests."""

from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from chunkcache import ChunkCache
from chunkcache.engine.tasks import TaskLane, promised, promised_steps

Steps = Generator[None, None, None]


def _noted(notes: list[str], name: str, num_steps: int) -> Callable[[], Steps]:
    def work() -> Steps:
        for i in range(num_steps):
            notes.append(f"{name}{i}")
            yield

    return work


def test_a_task_is_done_before_the_next_begins() -> None:
    notes: list[str] = []
    lane = TaskLane()
    lane.add(_noted(notes, "a", 2))
    lane.add(lambda: notes.append("b"))
    lane.add(_noted(notes, "c", 1))
    assert not notes
    num_steps = 0
    while lane.has_work:
        lane.step()
        num_steps += 1
    assert notes == ["a0", "a1", "b", "c0"]
    assert num_steps == 6, "the end of a's and of c's steps is a step each"
    lane.step()
    assert not lane.has_work


def test_what_a_task_returns_or_raises_is_promised() -> None:
    lane = TaskLane()

    def stop() -> int:
        raise StopIteration(7)  # as a generator's own send raises it

    def steps() -> Generator[None, None, str]:
        yield
        return "done"

    def broken() -> Generator[None, None, str]:
        yield
        raise KeyError("lost")

    raised, done, failed = promised(stop), promised_steps(steps), promised_steps(broken)
    cancelled = promised(lambda: 1)
    for task, _ in (raised, done, failed, cancelled):
        lane.add(task)
    assert cancelled[1].cancel()
    while lane.has_work:
        lane.step()
    with pytest.raises(StopIteration):
        raised[1].result()
    assert done[1].result() == "done"
    with pytest.raises(KeyError):
        failed[1].result()
    with pytest.raises(CancelledError):
        cancelled[1].result()


def test_an_answer_does_not_wait_for_the_end_of_a_task(
    open_cache: Callable[..., ChunkCache], passages: dict[str, Any]
) -> None:
    cache = open_cache()
    cache.put("tower", passages["tower"])
    answered: list[bool] = []

    def long() -> Steps:
        # Ends with the answer, which therefore cannot be waiting for it.
        while not answered:
            yield

    task = cache.runtime.engine.call_steps(long)
    answer = cache.answer("Which code?", ["tower"], max_tokens=4)
    assert len(answer.token_ids) == 4
    assert not task.done()
    answered.append(True)
    task.result(30)
