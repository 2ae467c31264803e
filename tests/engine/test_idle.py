"""Work for an idle engine: it waits, gives way, is bounded, and is lost with the engine."""

import queue
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest

from chunkcache.engine.decode import DecodeTile
from chunkcache.engine.engine import MAX_IDLE_WORK
from chunkcache.engine.idle import IdleCounts, IdleLane
from chunkcache.engine.request import GenerationJob
from chunkcache.engine.sampling import SamplingParams
from chunkcache.planning import AskOptions

QUESTION = "Who keeps the key?"
Steps = Generator[None, None, None]


def noted(notes: list[str], name: str, num_steps: int = 2) -> Callable[[], Steps]:
    """Work that notes each of its steps, and its end, however it comes."""

    def work() -> Steps:
        try:
            for i in range(num_steps):
                notes.append(f"{name}{i}")
                yield
        finally:
            notes.append(f"{name} ends")

    return work


def test_work_is_done_in_order_one_step_at_a_time() -> None:
    notes: list[str] = []
    lane = IdleLane(4)
    lane.add(noted(notes, "a"))
    lane.add(noted(notes, "b"))
    assert not notes
    while lane.has_work:
        lane.step()
    assert notes == ["a0", "a1", "a ends", "b0", "b1", "b ends"]
    assert lane.counts() == IdleCounts(waiting=0, dropped=0, failed=0)


def test_what_has_waited_longest_is_dropped() -> None:
    notes: list[str] = []
    lane = IdleLane(2)
    lane.add(noted(notes, "a"))
    lane.step()
    for name in ("b", "c"):
        lane.add(noted(notes, name))
    assert notes == ["a0", "a ends"], "what it held was given back"
    assert lane.counts() == IdleCounts(waiting=2, dropped=1, failed=0)
    lane.step()
    assert notes[-1] == "b0"


def test_work_that_gave_way_begins_anew() -> None:
    notes: list[str] = []
    lane = IdleLane(2)
    assert not lane.give_way()
    lane.add(noted(notes, "a"))
    lane.step()
    assert lane.give_way()
    assert not lane.give_way()
    while lane.has_work:
        lane.step()
    assert notes == ["a0", "a ends", "a0", "a1", "a ends"]


def test_a_failure_is_counted_and_ends_one_piece_of_work() -> None:
    def broken() -> Steps:
        yield
        raise RuntimeError("a fault of ours")

    notes: list[str] = []
    lane = IdleLane(2)
    lane.add(broken)
    lane.add(noted(notes, "a", 1))
    while lane.has_work:
        lane.step()
    assert lane.counts().failed == 1
    assert notes == ["a0", "a ends"]


@pytest.fixture
def filled(open_cache: Callable[..., Any], passages: dict[str, str]) -> Any:
    cache = open_cache()
    for name, text in passages.items():
        cache.put(name, text)
    return cache


def test_idle_work_waits_for_an_idle_engine(filled: Any, passages: dict[str, str]) -> None:
    engine = filled.runtime.engine
    gate, notes, done = threading.Event(), [], threading.Event()

    def work() -> Steps:
        notes.append("idle")
        done.set()
        yield

    held = engine.call(gate.wait)
    engine.when_idle(work)
    plan = filled.plan(QUESTION, list(passages), AskOptions())
    job = GenerationJob(plan, SamplingParams(), 5)
    engine.submit(job, lambda end: notes.append("answered"))
    gate.set()
    held.result()
    assert done.wait(60)
    assert notes == ["answered", "idle"]


def test_a_request_goes_first_at_the_next_step(
    filled: Any, passages: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    step = DecodeTile.step

    def noting(self: DecodeTile, rows: Any) -> Any:
        notes.append("decode")
        return step(self, rows)

    monkeypatch.setattr(DecodeTile, "step", noting)
    engine, begun, is_over = filled.runtime.engine, threading.Event(), threading.Event()

    def work() -> Steps:
        while not is_over.is_set():
            notes.append("idle")
            begun.set()
            yield

    engine.when_idle(work)
    assert begun.wait(60)
    plan = filled.plan(QUESTION, list(passages), AskOptions())
    stream = engine.submit(
        GenerationJob(plan, SamplingParams(), 8), lambda end: notes.append("end")
    )
    assert len(stream.result().token_ids) == 8
    is_over.set()
    first, end = notes.index("decode"), notes.index("end")
    assert notes[0] == "idle"
    assert notes[first:end] == ["decode"] * 7


def test_idle_work_gives_its_pages_to_a_request_that_needs_them(
    open_cache: Callable[..., Any], passages: dict[str, str]
) -> None:
    cache = open_cache()
    cache.put("tower", passages["tower"])
    prompt = cache.plan(QUESTION, ["tower"], AskOptions()).layout.num_tokens
    expected = cache.answer(QUESTION, ["tower"], max_tokens=10)
    cache.close()
    narrow = open_cache(pool_tokens=int(1.5 * (prompt + 10)))
    engine = narrow.runtime.engine
    plan = narrow.plan(QUESTION, ["tower"], AskOptions())
    job = GenerationJob(plan, SamplingParams(), 10)
    asked: list[Any] = []
    begun: list[None] = []
    ends: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> Steps:
        begun.append(None)
        steps = engine.solo_steps(job)
        next(steps)
        if not asked:
            asked.append(narrow.stream(QUESTION, ["tower"], AskOptions(max_tokens=10)))
        yield
        ends.put((yield from steps))

    engine.when_idle(work)
    alone = ends.get(timeout=60)
    assert len(begun) == 2, "it began anew"
    assert asked[0].finished().token_ids == expected.token_ids
    assert alone.token_ids == expected.token_ids
    engine.call(narrow.runtime.pool.check_integrity).result()


def test_the_backlog_is_bounded_and_lost_with_the_engine(filled: Any) -> None:
    engine = filled.runtime.engine
    gate, notes = threading.Event(), []
    held = engine.call(gate.wait)
    for i in range(MAX_IDLE_WORK + 3):
        engine.when_idle(noted(notes, f"{i}:", num_steps=10**9))
    gate.set()
    held.result()
    filled.close()
    assert engine.idle_counts == IdleCounts(waiting=0, dropped=MAX_IDLE_WORK + 3, failed=0)
    assert not any(n.startswith(("0:", "1:", "2:")) for n in notes), "the oldest went first"
