"""Case test C08: a cancellation at any moment of a request's life gives everything back once."""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from chunkcache.engine.stream import AnswerStream, Event, Finished, TextDelta
from chunkcache.errors import RequestCancelledError
from chunkcache.planning import AskOptions

QUESTION = "Who keeps the key?"


@pytest.fixture
def filled(open_cache: Callable[..., Any], passages: dict[str, str]) -> Any:
    cache = open_cache()
    for name, text in passages.items():
        cache.put(name, text)
    return cache


def _check_baseline(cache: Any) -> None:
    """Nothing is held, and the engine serves on: pages that came back twice would have ended it."""
    assert len(cache.answer(QUESTION, ["tower"], max_tokens=2).token_ids) == 2
    cache.runtime.pool.check_integrity()
    assert cache.runtime.engine.num_open_requests == 0
    assert cache.runtime.stack.stats().leases_open == 0


def test_C08_cancelled_before_its_prefill(filled: Any) -> None:
    gate = threading.Event()
    held = filled.runtime.engine.call(gate.wait)
    stream = filled.stream(QUESTION, ["tower", "harbour"], AskOptions(max_tokens=5))
    stream.cancel()
    gate.set()
    held.result()
    with pytest.raises(RequestCancelledError):
        stream.finished()
    _check_baseline(filled)


@pytest.mark.parametrize("num_answers", [1, 3])
@pytest.mark.parametrize("kind", [TextDelta, Finished])
@pytest.mark.parametrize("when", ["before", "behind"])
def test_C08_cancelled_within_the_engine_s_step(
    filled: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[TextDelta | Finished],
    num_answers: int,
    when: str,
) -> None:
    """On the engine's own thread, right before or behind a piece of text, or the end, is sent."""
    publish = AnswerStream.publish
    num_sent: Counter[type] = Counter()

    def cancelling(stream: AnswerStream, index: int, event: Event) -> None:
        num_sent[type(event)] += 1
        is_the_one = isinstance(event, kind) and num_sent[kind] == 1
        if is_the_one and when == "before":
            stream.cancel()
        publish(stream, index, event)
        if is_the_one and when == "behind":
            stream.cancel()

    monkeypatch.setattr(AnswerStream, "publish", cancelling)
    options = AskOptions(max_tokens=40, num_answers=num_answers)
    stream = filled.stream(QUESTION, ["tower", "harbour"], options)
    if kind is TextDelta:
        with pytest.raises(RequestCancelledError):
            stream.answers()
    else:  # equal answers, which end in one step
        assert len({a.token_ids for a in stream.answers()}) == 1
    monkeypatch.setattr(AnswerStream, "publish", publish)
    _check_baseline(filled)


def test_C08_cancelled_after_the_end_and_again(filled: Any) -> None:
    stream = filled.stream(QUESTION, ["tower", "harbour"], AskOptions(max_tokens=3))
    answer = stream.answer()
    for _ in range(3):
        stream.cancel()
    assert stream.answer() == answer
    _check_baseline(filled)
