"""Summaries of a quality run: averages by hand, paired intervals, gaps in the data, the frontier."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkcache.errors import InvalidValueError
from chunkcache_eval.quality.bootstrap import draw_counts, percentile_interval, resampled_means
from chunkcache_eval.quality.outcome import Outcome
from chunkcache_eval.quality.summary import (
    ArmSummary,
    best_within,
    frontier,
    paired_difference,
    summarise,
)

KLS = st.lists(st.floats(0, 5, allow_subnormal=False), min_size=2, max_size=12)


def _outcome(question_id: str, mean_kl: float = 0.1, **changes: Any) -> Outcome:
    values: dict[str, Any] = {
        "data": "d",
        "task": "",
        "policy": "hybrid",
        "preparation": "alone",
        "ratio": 0.1,
        "charged_ratio": 0.12,
        "prompt_tokens": 1000,
        "kl_first": 2 * mean_kl,
        "agreement": 0.5,
        "f1": 0.4,
        "exact_match": 0.0,
        "contains": 1.0,
        "full_f1": 0.6,
        "none_f1": 0.2,
        "ttft_ms": 100.0,
        "full_ttft_ms": 1000.0,
        "answer": "a",
        "full_answer": "b",
    }
    return Outcome(question_id=question_id, mean_kl=mean_kl, **(values | changes))


def _arm(charged_ratio: float, mean_kl: float, data: str = "d") -> ArmSummary:
    (arm,) = summarise(
        [_outcome("q", mean_kl, charged_ratio=charged_ratio, ratio=charged_ratio, data=data)],
        resamples=1,
    )
    return arm


def test_an_arm_is_averaged_over_its_questions() -> None:
    outcomes = [
        _outcome("q1", 0.1, f1=0.3, none_f1=0.1, full_f1=0.5, ttft_ms=90.0, charged_ratio=0.10),
        _outcome("q2", 0.2, f1=0.6, none_f1=0.2, full_f1=0.8, ttft_ms=95.0, charged_ratio=0.12),
        _outcome("q3", 0.6, f1=None, none_f1=None, full_f1=None, ttft_ms=400.0, charged_ratio=0.17),
    ]
    (arm,) = summarise(outcomes)
    assert (arm.data, arm.policy, arm.preparation, arm.ratio, arm.task, arm.n) == (
        *("d", "hybrid", "alone", 0.1),
        *("", 3),
    )
    assert arm.mean_kl == pytest.approx(0.3)
    assert arm.kl_first == pytest.approx(0.6)
    assert arm.charged_ratio == pytest.approx(0.13)
    assert arm.f1 == pytest.approx(0.45), "only questions with gold answers count"
    assert arm.gap_recovery == pytest.approx((0.45 - 0.15) / (0.65 - 0.15))
    assert arm.ttft_ms == 95.0, "the median, not the mean"
    assert arm.ttft_share == pytest.approx(0.095)
    assert arm.mean_kl_interval is not None
    assert json.loads(json.dumps(arm.to_dict()))["mean_kl_interval"] == list(arm.mean_kl_interval)


def test_an_interval_is_the_percentiles_of_all_resamples() -> None:
    # Two questions: a resample's mean is 0, 1/2 or 1 with probability 1/4, 1/2, 1/4.
    (arm,) = summarise([_outcome("q1", 0.0), _outcome("q2", 1.0)])
    assert arm.mean_kl_interval == (0.0, 1.0)
    assert arm.agreement_interval == (0.5, 0.5)
    counts = draw_counts(2, seed=0, resamples=4000)
    assert set(counts.sum(axis=1)) == {2.0}
    assert np.mean(counts[:, 0] == 1) == pytest.approx(0.5, abs=0.05)


def test_one_question_has_no_interval() -> None:
    (arm,) = summarise([_outcome("q1", f1=None, exact_match=None, contains=None)])
    assert (arm.n, arm.f1, arm.exact_match, arm.contains, arm.gap_recovery) == (1, *4 * (None,))
    assert (arm.mean_kl_interval, arm.agreement_interval, arm.f1_interval) == 3 * (None,)
    assert summarise([]) == []


def test_no_recovery_without_a_gap() -> None:
    near = [_outcome(f"q{i}", full_f1=0.205) for i in range(3)]
    worse = [_outcome(f"q{i}", full_f1=0.1) for i in range(3)]
    assert [summarise(o)[0].gap_recovery for o in (near, worse)] == [None, None]
    # One question in four has a gap: a third of the resamples has none, so no percentiles.
    rare = [_outcome(f"q{i}", full_f1=0.6 if i == 0 else 0.2) for i in range(4)]
    (arm,) = summarise(rare)
    assert arm.gap_recovery == pytest.approx(0.2 / 0.1)
    assert arm.gap_recovery_interval is None


def test_arms_of_a_data_set_are_drawn_alike() -> None:
    kls = [0.05, 0.3, 0.11, 0.7, 0.02]
    low = [_outcome(f"q{i}", kl, policy="low") for i, kl in enumerate(kls)]
    high = [_outcome(f"q{i}", kl + 1, policy="high") for i, kl in enumerate(kls)]
    first, second = summarise([*low, *high])
    assert first.policy == "high"
    assert first.mean_kl_interval is not None
    assert second.mean_kl_interval is not None
    shifted = [end + 1 for end in second.mean_kl_interval]
    assert list(first.mean_kl_interval) == pytest.approx(shifted)


def test_a_question_answered_twice_counts_once() -> None:
    outcomes = [_outcome("q1", 0.1), _outcome("q1", 0.3), _outcome("q2", 0.8)]
    (arm,) = summarise(outcomes)
    assert arm.n == 2
    assert arm.mean_kl == pytest.approx(0.5)


def test_by_task_and_data_set() -> None:
    outcomes = [
        _outcome("q1", 0.1, task="one"),
        _outcome("q2", 0.3, task="two"),
        _outcome("q1", 0.5, task="one", data="e"),
        _outcome("q1", 0.7, task="one", data="e", ratio=None, policy="none"),
    ]
    assert [(s.data, s.policy, s.n) for s in summarise(outcomes)] == [
        ("d", "hybrid", 2),
        ("e", "hybrid", 1),
        ("e", "none", 1),
    ]
    by_task = [(s.data, s.task, s.mean_kl) for s in summarise(outcomes, by_task=True)]
    assert by_task == [("d", "one", 0.1), ("d", "two", 0.3), ("e", "one", 0.5), ("e", "one", 0.7)]


@settings(max_examples=40, deadline=None)
@given(kls=KLS, seed=st.integers(0, 3), shuffled=st.randoms(use_true_random=False))
def test_order_is_nothing_and_the_interval_holds_the_mean(
    kls: list[float], seed: int, shuffled: Any
) -> None:
    outcomes = [_outcome(f"q{i}", kl, f1=kl / 5) for i, kl in enumerate(kls)]
    mixed = list(outcomes)
    shuffled.shuffle(mixed)
    arms = summarise(outcomes, seed=seed, resamples=400)
    assert summarise(mixed, seed=seed, resamples=400) == arms
    (arm,) = arms
    assert arm.mean_kl_interval is not None
    low, high = arm.mean_kl_interval
    assert min(kls) - 1e-9 <= low <= arm.mean_kl + 1e-9
    assert arm.mean_kl - 1e-9 <= high <= max(kls) + 1e-9


@settings(max_examples=40, deadline=None)
@given(kls=KLS, offset=st.floats(0.1, 2))
def test_a_difference_is_of_the_same_questions(kls: list[float], offset: float) -> None:
    a = [_outcome(f"q{i}", kl + offset) for i, kl in enumerate(kls)]
    b = [_outcome(f"q{i}", kl) for i, kl in enumerate(kls)]
    found = paired_difference(a, b[::-1], "mean_kl", resamples=200)
    assert found.n == len(kls)
    assert found.low == pytest.approx(offset)
    assert found.high == pytest.approx(offset)
    assert found.is_clear, "questions differ a lot, the arms by the same on each"
    back = paired_difference(b, a, "mean_kl", resamples=200)
    assert back.mean == pytest.approx(-found.mean)


def test_a_difference_takes_what_both_know() -> None:
    a = [_outcome("q1", f1=0.5), _outcome("q2", f1=0.2), _outcome("q3", f1=None)]
    b = [_outcome("q2", f1=0.4), _outcome("q1", f1=0.3), _outcome("q4", f1=0.9)]
    found = paired_difference(a, b, "f1")
    assert (found.n, found.is_clear) == (2, False)
    assert found.mean == pytest.approx(0.0)
    single = paired_difference(a[:1], b, "f1")
    assert (single.n, single.low, single.high, single.is_clear) == (1, None, None, False)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="mean_kl"):
        paired_difference([_outcome("q")], [_outcome("q")], "answer")
    with pytest.raises(InvalidValueError, match="share no question"):
        paired_difference([_outcome("q")], [_outcome("r")], "f1")
    with pytest.raises(InvalidValueError, match="resamples"):
        summarise([_outcome("q")], resamples=0)


def test_resamples_skip_what_is_unknown() -> None:
    values = np.array([1.0, math.nan, 3.0])
    counts = np.array([[1.0, 1.0, 1.0], [0.0, 3.0, 0.0], [2.0, 0.0, 1.0]])
    means = resampled_means(values, counts)
    assert means[[0, 2]].tolist() == pytest.approx([2.0, 5 / 3])
    assert np.isnan(means[1])
    assert percentile_interval(means) is None, "a third of the resamples is undefined"
    assert percentile_interval(np.full(3, math.nan)) is None
    assert percentile_interval(np.linspace(0, 100, 101)) == pytest.approx((2.5, 97.5))


def test_the_frontier_holds_what_nothing_beats() -> None:
    cheap, middle, dear = _arm(0.0, 0.5), _arm(0.1, 0.2), _arm(0.3, 0.1)
    beaten, as_dear = _arm(0.2, 0.2), _arm(0.3, 0.15)
    elsewhere = _arm(0.9, 0.9, data="e")
    arms = [dear, as_dear, elsewhere, beaten, middle, cheap]
    assert frontier(arms) == [cheap, middle, dear, elsewhere]
    assert best_within(arms, 0.05) is cheap
    assert best_within(arms, 0.2) is middle
    assert best_within([dear], 0.2) is None
