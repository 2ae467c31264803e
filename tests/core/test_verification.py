"""An answer verified at once: figures that can be checked, over the prompt that really ran."""

from collections.abc import Callable
from typing import Any

import pytest

from chunkcache import AskOptions, PolicyOptions, SamplingParams
from chunkcache.engine.request import GenerationJob
from chunkcache.fusion.fidelity import kl_divergence
from chunkcache.verification import COMPARED_TOKENS

QUESTION = "Who keeps the key?"


@pytest.fixture
def filled(open_cache: Callable[..., Any], passages: dict[str, str]) -> Any:
    cache = open_cache()
    for name, text in passages.items():
        cache.put(name, text)
    return cache


@pytest.mark.parametrize("max_tokens", [1, 3, 12])
def test_a_full_prefill_agrees_with_itself(
    filled: Any, passages: dict[str, str], max_tokens: int
) -> None:
    """A row out of place would show as a divergence: the tokens' distributions differ much."""
    answer = filled.answer(
        QUESTION, list(passages), policy="full", compare=True, max_tokens=max_tokens
    )
    found = answer.verification
    assert found.kl_first == 0.0
    assert found.mean_kl < 1e-6
    assert found.agreement == 1.0
    assert found.agreeing_tokens == len(found.full_token_ids) == max_tokens
    assert found.full_answer == answer.text
    assert answer.speedup == found.full_ttft_ms / answer.report.timings.ttft_ms


def test_figures_of_a_fusion(filled: Any, passages: dict[str, str]) -> None:
    options = AskOptions(policy="none", max_tokens=12, verify=True)
    growing = filled.stream(QUESTION, list(passages), options)
    found = growing.answer().verification
    engine = filled.runtime.engine
    plan = growing.plan
    full = engine.submit(
        GenerationJob(plan.in_full(), SamplingParams(), 12, COMPARED_TOKENS)
    ).result()
    assert found.full_token_ids == full.token_ids
    assert found.kl_first == kl_divergence(full.first_logits, growing.finished().first_logits) > 0
    # The same by one fusion per token, of the answer up to that token.
    rows = [
        engine.submit(GenerationJob(plan.scoring(full.token_ids[:n]), SamplingParams(), 1))
        .result()
        .scored_logits[-1]
        for n in range(COMPARED_TOKENS)
    ]
    one_by_one = sum(map(kl_divergence, full.step_logits, rows)) / COMPARED_TOKENS
    assert found.mean_kl == pytest.approx(one_by_one, rel=1e-3)
    assert len(full.step_logits) == COMPARED_TOKENS


def test_an_end_token_is_compared_too(
    open_cache: Callable[..., Any], model_dir: Callable[..., Any], passages: dict[str, str]
) -> None:
    """Whatever the full prefill says third is made an end token."""
    first = open_cache()
    first.put("tower", passages["tower"])
    third = first.answer(QUESTION, ["tower"], policy="full", max_tokens=3).token_ids[2]
    cache = open_cache("other", model=model_dir(eos_token_id=[2, third]))
    cache.put("tower", passages["tower"])
    answer = cache.answer(QUESTION, ["tower"], policy="none", compare=True)
    assert len(answer.verification.full_token_ids) <= 2
    assert answer.verification.mean_kl > 0


def test_what_was_left_out_is_left_out_of_the_full_prefill(
    filled: Any, passages: dict[str, str]
) -> None:
    plan = filled.plan(QUESTION, ["tower"], AskOptions())
    filled.runtime.stack.drop([i.key() for i in plan.identities])
    options = AskOptions(on_miss="skip", policy="none", max_tokens=5, verify=True)
    answer = filled.answer(QUESTION, ["tower", "bridge"], options=options)
    exact = filled.answer(QUESTION, ["bridge"], policy="full", max_tokens=5)
    assert answer.verification.full_token_ids == exact.token_ids
    again = filled.plan(QUESTION, ["tower"], AskOptions())
    assert not filled.runtime.stack.contains(again.identities[0].key()), "it stays left out"


def test_a_drawn_answer_is_verified_with_its_own_seed(
    filled: Any, passages: dict[str, str]
) -> None:
    drawn = SamplingParams(temperature=1.5, seed=7)
    options = AskOptions(policy="full", sampling=drawn, max_tokens=10, verify=True)
    answer = filled.answer(QUESTION, list(passages), options=options)
    assert answer.verification.full_token_ids == answer.token_ids
    assert answer.verification.agreement == 1.0


def test_nothing_is_verified_unasked(filled: Any, passages: dict[str, str]) -> None:
    answer = filled.answer(QUESTION, list(passages), max_tokens=2)
    assert answer.verification is None
    assert answer.speedup is None
    assert answer.to_dict()["chunkcache"]["verify"] is None


def test_verifying_twice_runs_once(filled: Any, passages: dict[str, str]) -> None:
    options = AskOptions(verify=True, max_tokens=2, policy_options=PolicyOptions())
    growing = filled.stream(QUESTION, list(passages), options)
    assert growing.answer().verification is growing.answer().verification
