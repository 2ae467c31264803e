"""``auto`` through the library: refused without a calibration, found in the store, the same bits."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from chunkcache.auto_calibration import auto_fingerprint, keep_auto_table
from chunkcache.errors import InvalidValueError, NotCalibratedError
from chunkcache.fusion.policies.auto_table import AutoRatio, AutoTable
from chunkcache.fusion.policies.registry import PolicyOptions
from chunkcache.planning import AskOptions

QUESTION = "When was the bridge built?"
TAKES_MORE = (1.0, 0.01)
TAKES_LITTLE = (0.01, 0.01)
RUNS_FULL = (1.0, 1.0)


def _keep(cache: Any, says: tuple[float, ...]) -> None:
    runtime = cache.runtime
    ratios = zip((0.2, 0.4), says, strict=True)
    table = AutoTable(
        model_name=runtime.model.runner.name,
        preparation=str(runtime.preparation),
        codec=runtime.codec.name,
        fingerprint=auto_fingerprint(runtime),
        num_questions=40,
        num_context_tokens=100,
        choices=tuple(AutoRatio(r, (math.log(kl), 0.0)) for r, kl in ratios),
        margin=0.0,
    )
    keep_auto_table(runtime.env, table)


def _fill(cache: Any, passages: dict[str, str]) -> list[str]:
    for name, text in passages.items():
        cache.put(name, text)
    return list(passages)


def _ask(cache: Any, names: list[str], target_kl: float = 0.05, **options: Any) -> Any:
    how = AskOptions(
        policy="auto", policy_options=PolicyOptions(target_kl=target_kl), max_tokens=12, **options
    )
    return cache.stream(QUESTION, names, how).finished()


def test_without_a_calibration_it_is_refused_with_the_command(
    open_cache: Callable[..., Any], passages: dict[str, str]
) -> None:
    """A calibration of another codec does not count; one in the store does, while it is open."""
    cache = open_cache(codec="bf16")
    names = _fill(cache, passages)
    with pytest.raises(NotCalibratedError, match="chunkcache eval auto --data") as refused:
        cache.answer(QUESTION, names, policy="auto")
    assert refused.value.param == "policy"
    other = open_cache("other", codec="raw")
    _keep(other, TAKES_LITTLE)
    _keep(cache, TAKES_MORE)
    answer = cache.answer(QUESTION, names, policy="auto", target_kl=0.05)
    estimate = answer.to_dict()["chunkcache"]["estimate"]
    expected = {"target_kl": 0.05, "estimated_kl": 0.01, "ratio": 0.4, "ran_full": False}
    assert estimate == pytest.approx(expected)
    assert answer.report.policy == answer.report.requested_policy == "auto(0.05)"
    assert cache.answer(QUESTION, names, policy="hybrid").report.estimate is None


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf])
def test_a_target_that_cannot_be_met_is_refused_before_any_work(
    open_cache: Callable[..., Any], passages: dict[str, str], target: float
) -> None:
    cache = open_cache()
    _keep(cache, TAKES_LITTLE)
    names = _fill(cache, passages)
    how = AskOptions(policy="auto", policy_options=PolicyOptions(target_kl=target))
    with pytest.raises(InvalidValueError, match="full") as refused:
        cache.plan(QUESTION, names, how)
    assert refused.value.param == "target_kl"


def test_a_prompt_longer_than_calibrated_ones_says_so(
    open_cache: Callable[..., Any], passages: dict[str, str]
) -> None:
    """The table is of prompts of up to 100 chunk tokens; all passages have more."""
    cache = open_cache()
    _keep(cache, TAKES_LITTLE)
    names = _fill(cache, passages)
    how = AskOptions(policy="auto")
    for asked, codes in ((names, ["outside_calibration"]), ([], [])):
        plan = cache.plan(QUESTION, asked, how)
        assert (plan.layout.num_context_tokens > 100) == bool(codes)
        assert [w.code for w in plan.warnings] == codes


def test_other_policies_have_no_target(open_cache: Callable[..., Any]) -> None:
    with pytest.raises(InvalidValueError, match="no parameter 'target_kl'"):
        open_cache().answer(QUESTION, [], policy="hybrid", target_kl=0.1)


def test_it_can_be_the_server_s_policy_with_its_own_target(
    open_cache: Callable[..., Any], passages: dict[str, str]
) -> None:
    cache = open_cache(policy="auto", target_kl=0.08)
    _keep(cache, RUNS_FULL)
    names = _fill(cache, passages)
    answer = cache.answer(QUESTION, names, compare=True)
    assert answer.report.policy == "auto(0.08)"
    assert answer.report.estimate is not None
    assert answer.report.estimate.ran_full
    assert answer.verification is not None
    assert answer.verification.mean_kl < 1e-9
    assert answer.verification.agreement == 1.0


@pytest.mark.parametrize("says", [TAKES_LITTLE, TAKES_MORE, RUNS_FULL])
def test_the_bits_do_not_depend_on_where_entries_come_from_or_who_else_asks(
    open_cache: Callable[..., Any],
    model_dir: Callable[..., Any],
    passages: dict[str, str],
    says: tuple[float, ...],
) -> None:
    """Invariant 4: cold, from RAM, in company, and from disk after a restart."""
    open_cache = partial(open_cache, model=model_dir(num_hidden_layers=3))
    cache = open_cache()
    _keep(cache, says)
    names = _fill(cache, passages)
    identities = cache.plan(QUESTION, names, AskOptions()).identities
    cache.runtime.stack.drop([i.key() for i in identities])
    runs = [_ask(cache, names), _ask(cache, names)]
    others = [
        cache.stream(f"Question {i}?", names, AskOptions(policy="auto", max_tokens=5 + i))
        for i in range(3)
    ]
    runs.append(_ask(cache, names))
    for other in others:
        other.finished()
    cache.close()
    restarted = open_cache()
    runs.append(_ask(restarted, names))
    assert {d.source for d in runs[-1].report.documents} == {"disk"}
    for run in runs[1:]:
        assert torch.equal(run.first_logits, runs[0].first_logits)
        assert run.token_ids == runs[0].token_ids
        assert run.report.estimate == runs[0].report.estimate
