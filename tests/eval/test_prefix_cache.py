"""The exact prefix cache: what it may reuse, what it is charged, and that it is exact."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkcache.fusion.layout import Layout
from chunkcache.planning import AskOptions
from chunkcache.settings import Settings
from chunkcache_eval.datasets.records import Passage, Question
from chunkcache_eval.quality.arms import arms_for
from chunkcache_eval.quality.measure import AnswerLengths
from chunkcache_eval.quality.outcome import Outcome
from chunkcache_eval.quality.outcome_log import OutcomeLog
from chunkcache_eval.quality.prefix_cache import SeenPrompts, run_behind_prefix
from chunkcache_eval.quality.question_set import QuestionSet
from chunkcache_eval.quality.run import measure_quality


def test_the_longest_beginning_of_an_earlier_prompt_counts() -> None:
    prompts = SeenPrompts()
    assert prompts.add([1, 2, 3, 4]) == 0, "nothing has been seen, not even the opening"
    assert prompts.add([1, 2, 9]) == 2
    assert prompts.add([1, 2, 3, 5, 6]) == 3
    assert prompts.add([1, 2, 3, 5, 7]) == 4
    assert prompts.add([7, 1, 2, 3]) == 0, "the same tokens further in are no prefix"
    assert prompts.add([1, 2, 9]) == 2, "the last token has to run"
    assert prompts.add([1, 2]) == 1


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=6))
def test_it_is_the_most_that_a_prefix_cache_could_reuse(asked: list[list[int]]) -> None:
    prompts = SeenPrompts()
    for index, prompt in enumerate(asked):
        expected = max(
            (n for p in asked[:index] for n in range(len(prompt)) if p[:n] == prompt[:n]),
            default=0,
        )
        assert prompts.add(prompt) == expected


@pytest.mark.parametrize("num_reused", [0, 1, 37, -1])
def test_a_run_behind_a_prefix_is_exact_and_charged_for_the_rest(
    open_cache: Callable[..., Any], passages: dict[str, str], num_reused: int
) -> None:
    """1. The library's forward over the whole prompt. 2. The prefix in place, then the tail."""
    cache = open_cache(codec="raw")
    for name, text in passages.items():
        cache.put(name, text)
    plan = cache.plan("Who keeps the key?", list(passages), AskOptions(policy="full"))
    layout, runtime = plan.layout, cache.runtime
    num_reused %= layout.num_tokens
    run = run_behind_prefix(runtime, layout, num_reused)
    with torch.inference_mode():
        ids = torch.tensor([layout.token_ids])
        plain = runtime.model.runner.hf_model(input_ids=ids, use_cache=False).logits[0, -1]
    assert (run.logits - plain).abs().max() <= 1e-4
    rest = layout.num_tokens - num_reused
    assert run.charged_ratio == pytest.approx(rest / layout.num_context_tokens)
    assert run.ttft_ms > 0
    assert runtime.pool.num_free_pages == runtime.pool.num_pages


def _measure(
    folder: Path, settings: Settings, questions: tuple[Question, ...], policy: str
) -> dict[str, Outcome]:
    sets, arms = [QuestionSet("tiny", "0", questions)], arms_for([policy], ["alone"], [])
    with OutcomeLog(folder) as log:
        run = measure_quality(sets, arms, log, settings=settings, lengths=AnswerLengths(2, 3))
    return {o.question_id: o for o in run.outcomes if o.policy == policy}


def _num_shared(a: Layout, b: Layout) -> int:
    return next(i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y)


def test_a_run_reuses_what_earlier_prompts_began_with(
    open_cache: Callable[..., Any], passages: dict[str, str], settings: Settings, tmp_path: Path
) -> None:
    """By hand, in the file's order.

    1. q0: nothing. q1 cannot be asked, and no cache sees it. q2, the same passages turned around:
       the opening and what the first passages have in common. q3: all of q0 but a changed question.
    2. The same from an arm that joins a folder where all other arms have been measured.
    """
    given = tuple(Passage(name, text) for name, text in passages.items())
    questions = (
        Question("q0", "Who keeps the key?", (), given),
        Question("q1", "Who keeps the key?", (), (Passage("p", " "),)),
        Question("q2", "Who keeps the key?", (), given[::-1]),
        Question("q3", "Who keeps the cat?", (), given),
    )
    measured = _measure(tmp_path / "out", settings, questions, "prefix-cache")
    assert set(measured) == {"q0", "q2", "q3"}
    cache = open_cache(model=settings.model, chunk_tokens=1024)
    for name, text in passages.items():
        cache.put(name, text)
    full = AskOptions(policy="full")
    layouts = {
        q.question_id: cache.plan(q.question, [p.passage_id for p in q.passages], full).layout
        for q in questions
        if q.question_id in measured
    }
    num_seen = {n: _num_shared(layouts[n], layouts["q0"]) if n > "q0" else 0 for n in measured}
    assert layouts["q2"].prefix_end <= num_seen["q2"] < layouts["q2"].chunks[0].end
    assert num_seen["q3"] >= layouts["q3"].chunks[-1].end
    for name, outcome in measured.items():
        rest = layouts[name].num_tokens - num_seen[name]
        assert outcome.charged_ratio == pytest.approx(rest / layouts[name].num_context_tokens)
        assert (outcome.mean_kl, outcome.agreement) == (0.0, 1.0)
        assert outcome.answer == outcome.full_answer
        assert outcome.ttft_ms > 0

    _measure(tmp_path / "later", settings, questions, "none")
    later = _measure(tmp_path / "later", settings, questions, "prefix-cache")
    charged = {name: outcome.charged_ratio for name, outcome in measured.items()}
    assert {name: outcome.charged_ratio for name, outcome in later.items()} == charged
