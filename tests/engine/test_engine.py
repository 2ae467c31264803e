"""The engine under load and under failure: nothing leaks, nobody waits for ever."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from chunkcache.errors import (
    ContextLengthExceededError,
    DrainingError,
    EngineFailedError,
    InvalidValueError,
    QueueFullError,
    RequestCancelledError,
)
from chunkcache.planning import AskOptions

QUESTION = "Who keeps the key?"


def _filled(open_cache: Callable[..., Any], passages: dict[str, str], **settings: Any) -> Any:
    cache = open_cache(**settings)
    for name, text in passages.items():
        cache.put(name, text)
    return cache


@pytest.fixture
def filled(open_cache: Callable[..., Any], passages: dict[str, str]) -> Any:
    return _filled(open_cache, passages)


def test_more_requests_than_the_tile_has_rows(filled: Any, passages: dict[str, str]) -> None:
    options = AskOptions(max_tokens=15)
    expected = filled.stream(QUESTION, list(passages), options).finished().text
    streams = [filled.stream(QUESTION, list(passages), options) for _ in range(11)]
    assert {s.finished().text for s in streams} == {expected}
    filled.runtime.pool.check_integrity()


@pytest.mark.parametrize("num_read", [0, 1, 5])
def test_cancelling_frees_the_pages(filled: Any, passages: dict[str, str], num_read: int) -> None:
    for _ in range(5):
        with filled.stream(QUESTION, list(passages), AskOptions(max_tokens=200)) as stream:
            pieces = iter(stream)
            for _ in range(num_read):
                next(pieces)
        with pytest.raises(RequestCancelledError):
            stream.finished()
        stream.cancel()
    filled.answer(QUESTION, list(passages), max_tokens=2)
    filled.runtime.pool.check_integrity()
    assert filled.runtime.engine.num_open_requests == 0
    assert filled.runtime.stack.stats().leases_open == 0


def test_cancelling_after_the_end_does_nothing(filled: Any, passages: dict[str, str]) -> None:
    stream = filled.stream(QUESTION, list(passages), AskOptions(max_tokens=3))
    text = stream.finished().text
    stream.cancel()
    assert stream.finished().text == text


def test_what_never_fits_is_refused_at_once(
    open_cache: Callable[..., Any], passages: dict[str, str]
) -> None:
    cache = _filled(open_cache, passages, pool_tokens=160)
    with pytest.raises(ContextLengthExceededError, match="160") as caught:
        cache.stream(QUESTION, list(passages) * 2, AskOptions())
    assert caught.value.param == "document_ids"


def test_two_that_fit_only_one_by_one_both_finish(
    open_cache: Callable[..., Any], passages: dict[str, str]
) -> None:
    cache = _filled(open_cache, passages)
    prompt = cache.plan(QUESTION, ["tower"], AskOptions()).layout.num_tokens
    cache.close()
    narrow = open_cache(pool_tokens=int(1.5 * (prompt + 10)))
    streams = [narrow.stream(QUESTION, ["tower"], AskOptions(max_tokens=10)) for _ in range(3)]
    assert len({s.finished().text for s in streams}) == 1


def test_the_context_limit_met_exactly(open_cache: Callable[..., Any]) -> None:
    cache = open_cache()
    limit = cache.runtime.model.runner.spec.max_positions
    cache.put("a", "The key is kept by the baker.")
    base = cache.plan("", ["a"], AskOptions()).layout.num_tokens
    question = "." * (limit - 1 - base)
    assert cache.plan(question, ["a"], AskOptions()).layout.num_tokens == limit - 1
    answer = cache.answer(question, ["a"], policy="full", max_tokens=64)
    assert len(answer.token_ids) == 1
    assert answer.finish_reason == "length"
    with pytest.raises(ContextLengthExceededError, match=str(limit)):
        cache.answer(question + ".", ["a"])


def test_a_full_queue_refuses(open_cache: Callable[..., Any], passages: dict[str, str]) -> None:
    cache = _filled(open_cache, passages, max_queued_requests=1, decode_tile_rows=1)
    gate = threading.Event()
    held = cache.runtime.engine.call(gate.wait)
    streams = [cache.stream(QUESTION, list(passages), AskOptions(max_tokens=2)) for _ in range(2)]
    with pytest.raises(QueueFullError):
        cache.stream(QUESTION, list(passages), AskOptions(max_tokens=2))
    gate.set()
    held.result()
    assert len({s.finished().text for s in streams}) == 1
    cache.answer(QUESTION, list(passages), max_tokens=2)


def test_a_closed_engine_refuses_and_finishes_what_it_took(
    filled: Any, passages: dict[str, str]
) -> None:
    stream = filled.stream(QUESTION, list(passages), AskOptions(max_tokens=8))
    filled.close()
    assert len(stream.finished().token_ids) == 8
    with pytest.raises(DrainingError):
        filled.runtime.engine.call(lambda: None)


def test_a_fault_fails_one_request_and_not_the_engine(
    filled: Any, passages: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    """The log says where, and holds nothing of what was asked or read."""
    plan = filled.plan(QUESTION, list(passages), AskOptions())
    good = filled.answer(QUESTION, list(passages), max_tokens=4)

    class Broken(type(plan.policy)):  # type: ignore[misc]
        def select(self, candidates: Any) -> Any:
            raise RuntimeError("a fault of ours")

    from dataclasses import replace

    from chunkcache.engine.request import GenerationJob
    from chunkcache.engine.sampling import SamplingParams

    broken = replace(plan, policy=Broken(0.1))
    stream = filled.runtime.engine.submit(GenerationJob(broken, SamplingParams(), 4))
    with pytest.raises(EngineFailedError) as caught:
        stream.result()
    assert "a fault of ours" not in str(caught.value)
    assert filled.answer(QUESTION, list(passages), max_tokens=4).text == good.text
    filled.runtime.pool.check_integrity()
    logged = "".join(capfd.readouterr())
    assert "RuntimeError: a fault of ours" in logged
    assert "test_engine.py" in logged
    for text in (QUESTION, *passages.values(), "token_ids="):
        assert text not in logged


def test_a_task_s_error_reaches_its_caller(filled: Any) -> None:
    def fail() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        filled.runtime.engine.call(fail).result()
    assert filled.runtime.engine.call(lambda: 7).result() == 7


def test_no_answer_token_is_no_answer(filled: Any, passages: dict[str, str]) -> None:
    with pytest.raises(InvalidValueError) as caught:
        filled.answer(QUESTION, list(passages), max_tokens=0)
    assert caught.value.param == "max_tokens"


def test_two_threads_share_one_engine(filled: Any, passages: dict[str, str]) -> None:
    names = list(passages)
    expected = {n: filled.answer(QUESTION, [n], max_tokens=12).text for n in names}
    wrong: list[str] = []

    def ask(name: str) -> None:
        for _ in range(10):
            if filled.answer(QUESTION, [name], max_tokens=12).text != expected[name]:
                wrong.append(name)

    threads = [threading.Thread(target=ask, args=(n,)) for n in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_every_end_token_ends_an_answer(
    open_cache: Callable[..., Any], model_dir: Callable[..., Any], passages: dict[str, str]
) -> None:
    """Whatever the model would say next is made an end token: the answer is empty."""
    cache = _filled(open_cache, passages)
    first = cache.answer(QUESTION, ["tower"], policy="full", max_tokens=3).token_ids[0]
    cache.close()
    ends = open_cache("other", model=model_dir(eos_token_id=[2, first]))
    ends.put("tower", passages["tower"])
    answer = ends.answer(QUESTION, ["tower"], policy="full", max_tokens=3)
    assert (answer.token_ids, answer.text, answer.finish_reason) == ((), "", "stop")
