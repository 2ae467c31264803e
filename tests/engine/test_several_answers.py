"""Several answers behind one fusion: each as if it were alone, on pages that they share."""

from collections.abc import Callable
from typing import Any

import pytest

from chunkcache.engine.answer_text import AnswerText
from chunkcache.engine.decode import DecodeTile
from chunkcache.engine.sampling import SamplingParams
from chunkcache.errors import (
    ContextLengthExceededError,
    EngineFailedError,
    InvalidValueError,
    RequestCancelledError,
)
from chunkcache.pages import PagePool
from chunkcache.planning import AskOptions

Caches = Callable[..., Any]

QUESTION = "Who keeps the key?"


def options(**fields: Any) -> AskOptions:
    return AskOptions(**{"sampling": SamplingParams(1.3, seed=11), "max_tokens": 20} | fields)


@pytest.fixture
def filled(open_cache: Caches, passages: dict[str, str]) -> Any:
    cache = open_cache()
    for name, text in passages.items():
        cache.put(name, text)
    return cache


@pytest.mark.parametrize("page_tokens", [1, 16, 512])
@pytest.mark.parametrize("on_miss", ["prefill", "skip"])
def test_each_answer_is_as_if_it_were_alone(
    open_cache: Caches, passages: dict[str, str], page_tokens: int, on_miss: Any
) -> None:
    """Invariant 4, with pages on which the answers part in the middle, at the end, or never."""
    cache = open_cache(page_tokens=page_tokens)
    for name, text in passages.items():
        cache.put(name, text)
    if on_miss == "skip":
        plan = cache.plan(QUESTION, ["tower"], AskOptions())
        cache.runtime.stack.drop([i.key() for i in plan.identities])
    together = cache.stream(QUESTION, list(passages), options(num_answers=4, on_miss=on_miss))
    answers = together.answers()
    assert len({a.text for a in answers}) == 4
    for index, answer in enumerate(answers):
        sampling = options().sampling.of_answer(index)
        alone = options(sampling=sampling, on_miss=on_miss)
        assert cache.stream(QUESTION, list(passages), alone).answer().token_ids == answer.token_ids
    assert len({a.report.account.prompt_tokens for a in answers}) == 1
    cache.runtime.pool.check_integrity()


def test_the_first_of_several_is_the_only_one_of_one(filled: Any) -> None:
    several = filled.stream(QUESTION, ["tower"], options(num_answers=3)).answers()
    assert filled.stream(QUESTION, ["tower"], options()).answer().text == several[0].text


def test_the_prompt_is_run_and_counted_once(filled: Any) -> None:
    meter, stack = filled.runtime.meter, filled.runtime.stack
    before, lookups = meter.stats(), stack.stats().lookups
    answers = filled.stream(QUESTION, ["tower", "bridge"], options(num_answers=3)).answers()
    after = meter.stats()
    plan = filled.plan(QUESTION, ["tower", "bridge"], options())
    assert stack.stats().lookups - lookups == len(plan.identities)
    num_prompt = sum(after.prompt_tokens.values()) - sum(before.prompt_tokens.values())
    assert num_prompt == answers[0].report.account.prompt_tokens
    assert after.answer_tokens - before.answer_tokens == sum(len(a.token_ids) for a in answers)
    assert sum(after.outcomes.values()) - sum(before.outcomes.values()) == 1


def test_answers_share_the_prompt_s_whole_pages(
    filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool: PagePool = filled.runtime.pool
    step, seen = DecodeTile.step, []

    def watched(self: DecodeTile, rows: Any) -> Any:
        seen.append(([set(r.pages.pages) for r in rows], pool.num_free_pages))
        return step(self, rows)

    monkeypatch.setattr(DecodeTile, "step", watched)
    num_tokens = filled.plan(QUESTION, ["tower"], options()).layout.num_tokens
    filled.stream(QUESTION, ["tower"], options(num_answers=3)).answers()
    pages, num_free = seen[0]
    assert len(set.intersection(*pages)) == num_tokens // pool.page_tokens > 0
    assert pool.num_pages - num_free == len(set.union(*pages))


@pytest.mark.parametrize("num_read", [0, 1, 5])
def test_C14_leaving_ends_every_answer(filled: Any, num_read: int) -> None:
    """A reader that leaves takes all of its answers along, begun or not."""
    for _ in range(3):
        with filled.stream(QUESTION, ["tower"], options(num_answers=3, max_tokens=300)) as stream:
            events = stream.events()
            for _ in range(num_read):
                next(events)
        with pytest.raises(RequestCancelledError):
            stream.answers()
    filled.answer(QUESTION, ["tower"], max_tokens=2)
    assert filled.runtime.engine.num_open_requests == 0
    filled.runtime.pool.check_integrity()
    assert filled.runtime.meter.stats().outcomes["request_cancelled"] == 3


def test_one_that_fails_takes_the_others_along(
    filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = DecodeTile.step, iter(range(10**6))

    def failing(self: DecodeTile, rows: Any) -> Any:
        if next(calls) == 5:
            raise RuntimeError("broken")
        return step(self, rows)

    monkeypatch.setattr(DecodeTile, "step", failing)
    with pytest.raises(EngineFailedError):
        filled.stream(QUESTION, ["tower"], options(num_answers=3)).answers()
    assert len(filled.stream(QUESTION, ["tower"], options(num_answers=3)).answers()) == 3
    assert filled.runtime.engine.num_open_requests == 0
    filled.runtime.pool.check_integrity()
    assert filled.runtime.meter.stats().outcomes["internal_error"] == 1


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("where", ["branch", "lease"])
def test_an_answer_that_cannot_branch_off_fails_the_request_alone(
    filled: Any, monkeypatch: pytest.MonkeyPatch, at: int, where: str
) -> None:
    """The engine goes on, and has every page back, wherever it failed."""
    branch, calls = PagePool.branch, iter(range(10**6))

    def failing(self: PagePool, *args: Any, **fields: Any) -> Any:
        if next(calls) != at:
            return branch(self, *args, **fields)
        if where == "branch":
            raise RuntimeError("broken")
        with monkeypatch.context() as patch:
            patch.setattr("chunkcache.pages.PageLease", broken)
            return branch(self, *args, **fields)

    def broken(*args: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(PagePool, "branch", failing)
    with pytest.raises(EngineFailedError):
        filled.stream(QUESTION, ["tower"], options(num_answers=3)).answers()
    assert len(filled.stream(QUESTION, ["tower"], options(num_answers=3)).answers()) == 3
    assert filled.runtime.engine.num_open_requests == 0
    filled.runtime.pool.check_integrity()


@pytest.mark.parametrize("num_answers", [1, 3])
def test_an_end_that_cannot_be_made_is_a_failure(
    filled: Any, monkeypatch: pytest.MonkeyPatch, num_answers: int
) -> None:
    """It is counted once, and the engine goes on."""
    finish, calls = AnswerText.finish, iter(range(10**6))

    def failing(self: AnswerText) -> Any:
        if next(calls) == 0:
            raise RuntimeError("broken")
        return finish(self)

    monkeypatch.setattr(AnswerText, "finish", failing)
    with pytest.raises(EngineFailedError):
        filled.stream(QUESTION, ["tower"], options(num_answers=num_answers)).answers()
    assert filled.stream(QUESTION, ["tower"], options()).answer().text
    assert filled.runtime.engine.num_open_requests == 0
    filled.runtime.pool.check_integrity()


def test_more_answers_than_fit_are_refused_at_once(
    open_cache: Caches, passages: dict[str, str]
) -> None:
    """C12: nothing waits for pages or rows that there will never be."""
    cache = open_cache(pool_tokens=320, decode_tile_rows=3)
    cache.put("tower", passages["tower"])
    with pytest.raises(InvalidValueError, match="over 3") as caught:
        cache.stream(QUESTION, ["tower"], options(num_answers=4))
    assert caught.value.param == "n"
    with pytest.raises(ContextLengthExceededError, match="pages") as caught:
        cache.stream(QUESTION, ["tower"], options(num_answers=3, max_tokens=100))
    assert caught.value.param == "n"
    waiting = [
        cache.stream(QUESTION, ["tower"], options(num_answers=2, max_tokens=10)) for _ in range(4)
    ]
    assert len({tuple(a.text for a in w.answers()) for w in waiting}) == 1


def test_answers_that_are_run_again_share_nothing(
    open_cache: Caches, model_dir: Callable[..., Any], passages: dict[str, str]
) -> None:
    """A longrope model runs all rows again past its switch: each answer on pages of its own."""
    switch = 128
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "short_factor": [1.0 + 0.1 * i for i in range(4)],
        "long_factor": [2.0 + 0.7 * i for i in range(4)],
        "original_max_position_embeddings": switch,
        "partial_rotary_factor": 0.5,
    }
    lengths = {"max_position_embeddings": 256, "original_max_position_embeddings": switch}
    cache = open_cache(model=model_dir("phi3", rope_parameters=rope, **lengths))
    cache.put("note", passages["tower"][:60])
    prompt = cache.plan(QUESTION, ["note"], AskOptions()).layout.num_tokens
    assert prompt < switch
    wanted = options(num_answers=3, max_tokens=switch - prompt + 12)
    answers = cache.stream(QUESTION, ["note"], wanted).answers()
    for answer in answers:
        assert "rotation_switched" in [w.code for w in answer.report.warnings]
    for index, answer in enumerate(answers):
        alone = options(sampling=wanted.sampling.of_answer(index), max_tokens=wanted.max_tokens)
        assert cache.stream(QUESTION, ["note"], alone).answer().token_ids == answer.token_ids
    cache.runtime.pool.check_integrity()
