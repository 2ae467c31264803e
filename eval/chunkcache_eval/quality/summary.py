"""Outcomes of a quality run brought together: one summary per arm, and arms compared in pairs.

This file knows what an arm is and how its numbers are averaged. It doesn't know how outcomes are
measured, drawn or printed.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from chunkcache.errors import InvalidValueError
from chunkcache_eval.quality.bootstrap import (
    Floats,
    Interval,
    draw_counts,
    percentile_interval,
    resampled_means,
)
from chunkcache_eval.quality.outcome import Outcome

METRICS = (
    "charged_ratio",
    "kl_first",
    "mean_kl",
    "agreement",
    "f1",
    "exact_match",
    "contains",
    "full_f1",
    "none_f1",
    "ttft_ms",
    "full_ttft_ms",
    "ingest_cost",
)
"""The fields of an outcome that can be averaged and compared."""

MIN_GAP = 0.01
"""Smallest lead in F1 of the full prefill over concatenation that a recovery is divided by."""

QuestionKey: TypeAlias = tuple[str, str, str]
ArmKey: TypeAlias = tuple[str, str, str, str, float]


@dataclass(frozen=True, kw_only=True)
class ArmSummary:
    """One arm over the questions of one data set (or of one task of it).

    Attributes:
        data: Stem of the data file.
        policy: The arm's name.
        preparation: How the chunks were prefilled.
        ratio: The nominal ratio; None for policies that have none.
        task: The task that it is over; empty when it is over all of the data set.
        charged_ratio: Mean cost of the fusions in shares of the context's layer-rows.
        n: Number of questions.
        kl_first: Mean KL divergence of the first answer token, in nats.
        mean_kl: Mean of the questions' mean KL divergence, in nats.
        agreement: Mean leading agreement with the full prefill's greedy answer, 0 to 1.
        f1: Mean token F1; None where no question has gold answers.
        exact_match: Share of exact matches; None likewise.
        contains: Mean answer containment; None likewise.
        gap_recovery: Share of the F1 between concatenation (0) and full prefill (1) that the arm
            wins back; None where they are less than `MIN_GAP` apart.
        ttft_ms: Median time to the first token.
        full_ttft_ms: The same of the full prefill.
        ingest_cost: Mean rows per chunk token that the offline job runs.
        mean_kl_interval: 95 % bootstrap interval; None for fewer than two questions.
        agreement_interval: Likewise.
        f1_interval: Likewise, counting questions with gold answers.
        gap_recovery_interval: Likewise; also None where many resamples have no gap.
    """

    data: str
    policy: str
    preparation: str
    ratio: float | None
    task: str = ""
    charged_ratio: float
    n: int
    kl_first: float
    mean_kl: float
    agreement: float
    f1: float | None
    exact_match: float | None
    contains: float | None
    gap_recovery: float | None
    ttft_ms: float
    full_ttft_ms: float
    ingest_cost: float
    mean_kl_interval: Interval | None
    agreement_interval: Interval | None
    f1_interval: Interval | None
    gap_recovery_interval: Interval | None

    @property
    def key(self) -> ArmKey:
        """What tells this arm from the others; sorts, too."""
        return _arm_key(self, self.task)

    @property
    def ttft_share(self) -> float | None:
        """Time to the first token over the full prefill's; None if that took no time."""
        return self.ttft_ms / self.full_ttft_ms if self.full_ttft_ms > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """The fields as they go into JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Difference:
    """How much more of a metric one arm has than another, over the questions both answered.

    Attributes:
        mean: Mean of the differences, first arm minus second.
        low: Lower end of its 95 % interval; None for fewer than two questions.
        high: Upper end, likewise.
        n: Number of questions.
    """

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def group_by_arm(
    outcomes: Iterable[Outcome], *, by_task: bool = False
) -> dict[ArmKey, list[Outcome]]:
    """The outcomes of each arm, arms in the order of their keys."""
    groups: defaultdict[ArmKey, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[_arm_key(outcome, outcome.task if by_task else "")].append(outcome)
    return dict(sorted(groups.items()))


def summarise(
    outcomes: Iterable[Outcome], *, by_task: bool = False, seed: int = 0, resamples: int = 2000
) -> list[ArmSummary]:
    """One summary per arm and data set, with 95 % percentile bootstrap intervals over questions.

    Every arm of a data set is resampled by the same draws of questions, so that intervals of arms
    that answered the same questions can be compared. A question answered twice by an arm counts
    once, with the mean of both. The order of the outcomes doesn't matter.

    Args:
        outcomes: Of any arms and data sets.
        by_task: Whether to summarise each task of a data set by itself.
        seed: Of the draws.
        resamples: Number of draws.

    Returns:
        The summaries, sorted by data set, task, policy, preparation and ratio.

    Raises:
        InvalidValueError: If ``resamples`` is less than 1.
    """
    arms = group_by_arm(outcomes, by_task=by_task)
    sets: defaultdict[tuple[str, str], dict[ArmKey, list[Outcome]]] = defaultdict(dict)
    for key, group in arms.items():
        sets[key[:2]][key] = group
    summaries: list[ArmSummary] = []
    for members in sets.values():
        questions = sorted({_question(o) for group in members.values() for o in group})
        counts = draw_counts(len(questions), seed=seed, resamples=resamples)
        for key, group in members.items():
            summaries.append(_summary(group, key[1], questions, counts))
    return summaries


def paired_difference(
    a: Iterable[Outcome], b: Iterable[Outcome], metric: str, *, seed: int = 0, resamples: int = 2000
) -> Difference:
    """Compares two arms question by question.

    Args:
        a: Outcomes of the first arm.
        b: Outcomes of the second.
        metric: One of `METRICS`.
        seed: Of the draws.
        resamples: Number of draws.

    Returns:
        The mean of ``a - b`` over the questions for which both know the metric, with its interval.

    Raises:
        InvalidValueError: If there is no such metric, or no question that both know it for.
    """
    if metric not in METRICS:
        raise InvalidValueError(f"no metric {metric!r}; there are {', '.join(METRICS)}")
    first, second = _by_question(a, metric), _by_question(b, metric)
    questions = sorted(first.keys() & second.keys())
    if not questions:
        raise InvalidValueError(f"the two arms share no question with a known {metric}")
    values = np.array([first[q] - second[q] for q in questions])
    counts = draw_counts(len(questions), seed=seed, resamples=resamples)
    low, high = _mean_interval(values, counts) or (None, None)
    return Difference(float(values.mean()), low, high, len(questions))


def frontier(summaries: Iterable[ArmSummary]) -> list[ArmSummary]:
    """The arms that no other arm of their data set and task beats, by charged cost.

    One arm beats another if it is no worse in `charged_ratio` and `mean_kl` and better in one.
    """
    arms = list(summaries)
    kept = [a for a in arms if not any(_beats(b, a) for b in arms if b.key[:2] == a.key[:2])]
    return sorted(kept, key=lambda a: (a.data, a.task, a.charged_ratio, a.mean_kl, a.key))


def best_within(summaries: Sequence[ArmSummary], budget: float) -> ArmSummary | None:
    """The arm of lowest mean KL among those that charge at most ``budget``; None without any."""
    affordable = [a for a in summaries if a.charged_ratio <= budget]
    return min(affordable, key=lambda a: (a.mean_kl, a.charged_ratio, a.key), default=None)


def _arm_key(arm: Outcome | ArmSummary, task: str) -> ArmKey:
    ratio = -1.0 if arm.ratio is None else arm.ratio
    return arm.data, task, arm.policy, arm.preparation, ratio


def _question(outcome: Outcome) -> QuestionKey:
    return outcome.data, outcome.task, outcome.question_id


def _by_question(group: Iterable[Outcome], metric: str) -> dict[QuestionKey, float]:
    found: defaultdict[QuestionKey, list[float]] = defaultdict(list)
    for outcome in group:
        value = getattr(outcome, metric)
        if value is not None:
            found[_question(outcome)].append(value)
    return {question: math.fsum(values) / len(values) for question, values in found.items()}


def _summary(
    group: Sequence[Outcome], task: str, questions: Sequence[QuestionKey], counts: Floats
) -> ArmSummary:
    tables = {metric: _by_question(group, metric) for metric in METRICS}
    values = {metric: _aligned(table, questions) for metric, table in tables.items()}
    recovery, recovery_interval = _gap_recovery(values, counts)
    first = group[0]
    return ArmSummary(
        data=first.data,
        policy=first.policy,
        preparation=first.preparation,
        ratio=first.ratio,
        task=task,
        charged_ratio=_mean(tables["charged_ratio"]),
        n=len(tables["mean_kl"]),
        kl_first=_mean(tables["kl_first"]),
        mean_kl=_mean(tables["mean_kl"]),
        agreement=_mean(tables["agreement"]),
        f1=_mean_if_any(tables["f1"]),
        exact_match=_mean_if_any(tables["exact_match"]),
        contains=_mean_if_any(tables["contains"]),
        gap_recovery=recovery,
        ttft_ms=median(tables["ttft_ms"].values()),
        full_ttft_ms=median(tables["full_ttft_ms"].values()),
        ingest_cost=_mean(tables["ingest_cost"]),
        mean_kl_interval=_mean_interval(values["mean_kl"], counts),
        agreement_interval=_mean_interval(values["agreement"], counts),
        f1_interval=_mean_interval(values["f1"], counts),
        gap_recovery_interval=recovery_interval,
    )


def _aligned(table: Mapping[QuestionKey, float], questions: Sequence[QuestionKey]) -> Floats:
    return np.array([table.get(question, math.nan) for question in questions])


def _mean(table: Mapping[QuestionKey, float]) -> float:
    return math.fsum(table.values()) / len(table)


def _mean_if_any(table: Mapping[QuestionKey, float]) -> float | None:
    return _mean(table) if table else None


def _mean_interval(values: Floats, counts: Floats) -> Interval | None:
    if np.count_nonzero(~np.isnan(values)) < 2:
        return None
    return percentile_interval(resampled_means(values, counts))


def _gap_recovery(
    values: Mapping[str, Floats], counts: Floats
) -> tuple[float | None, Interval | None]:
    arm, full, none = values["f1"], values["full_f1"], values["none_f1"]
    known = ~np.isnan(arm + full + none)
    num_known = np.count_nonzero(known)
    if not num_known:
        return None, None
    won, gap = np.where(known, arm - none, np.nan), np.where(known, full - none, np.nan)
    mean_gap = float(gap[known].mean())
    if mean_gap < MIN_GAP:
        return None, None
    recovery = float(won[known].mean()) / mean_gap
    if num_known < 2:
        return recovery, None
    gaps = resampled_means(gap, counts)
    has_gap = np.nan_to_num(gaps) >= MIN_GAP
    unknown = np.full_like(gaps, np.nan)
    resampled = np.divide(resampled_means(won, counts), gaps, out=unknown, where=has_gap)
    return recovery, percentile_interval(resampled)


def _beats(a: ArmSummary, b: ArmSummary) -> bool:
    no_worse = a.charged_ratio <= b.charged_ratio and a.mean_kl <= b.mean_kl
    return no_worse and (a.charged_ratio < b.charged_ratio or a.mean_kl < b.mean_kl)
