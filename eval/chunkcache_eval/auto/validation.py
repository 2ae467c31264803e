"""Does ``auto`` keep its promise on questions it was not calibrated on, and what does it save?"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from chunkcache.fusion.policies.auto_table import CONFIDENCE, AutoTable
from chunkcache_eval.auto.trace import Trace, chosen_point


@dataclass(frozen=True)
class FixedRatio:
    """``hybrid`` at one ratio on the same questions.

    Attributes:
        ratio: The ratio.
        high_kl: Mean KL divergence, in nats, that the given share of the questions stays within.
        charged_ratio: Mean over the questions.
    """

    ratio: float
    high_kl: float
    charged_ratio: float


@dataclass(frozen=True)
class TargetCheck:
    """One target on some questions.

    Attributes:
        target_kl: The target, in nats.
        num_questions: How many.
        met_ratio: Share whose true mean KL divergence was within the target.
        high_kl: As of :class:`FixedRatio`.
        mean_kl: Mean of the true divergences.
        estimated_kl: Mean of what the policy said they were at most.
        full_ratio: Share that ended in a full prefill.
        charged_ratio: Mean over the questions.
        fixed_charged_ratio: Of the fixed ratio whose ``high_kl`` is the same, between the two
            measured ones around it; None where none is so close.
        same_promise_charged_ratio: Of the least measured ratio that keeps within the target as
            often as promised.
    """

    target_kl: float
    num_questions: int
    met_ratio: float
    high_kl: float
    mean_kl: float
    estimated_kl: float
    full_ratio: float
    charged_ratio: float
    fixed_charged_ratio: float | None
    same_promise_charged_ratio: float


def fixed_ratios(traces: Sequence[Trace]) -> list[FixedRatio]:
    """``hybrid`` at every measured ratio, ascending, and last the full prefill."""
    found = [
        FixedRatio(
            points[0].ratio,
            high([p.mean_kl for p in points]),
            mean(p.charged_ratio for p in points),
        )
        for points in zip(*(t.points for t in traces), strict=True)
    ]
    return [*found, FixedRatio(1.0, 0.0, mean(t.full_charged_ratio for t in traces))]


def check_target(table: AutoTable, traces: Sequence[Trace], target_kl: float) -> TargetCheck:
    """Replay a target on questions.

    Args:
        table: What the policy goes by.
        traces: The questions.
        target_kl: The target, in nats.
    """
    kls, estimates, charged = [], [], []
    for trace in traces:
        bounds = [table.bound(i, p.signals) for i, p in enumerate(trace.points)]
        point = chosen_point(trace, bounds, target_kl)
        if point is None:
            kl, estimate, cost = 0.0, 0.0, trace.full_charged_ratio
        else:
            kl, estimate = point.mean_kl, bounds[trace.points.index(point)]
            cost = point.charged_ratio
        kls.append(kl)
        estimates.append(estimate)
        charged.append(cost)
    high_kl = high(kls)
    return TargetCheck(
        target_kl=target_kl,
        num_questions=len(traces),
        met_ratio=mean(kl <= target_kl for kl in kls),
        high_kl=high_kl,
        mean_kl=mean(kls),
        estimated_kl=mean(estimates),
        full_ratio=mean(e == 0.0 for e in estimates),
        charged_ratio=mean(charged),
        fixed_charged_ratio=_charged_at(fixed_ratios(traces), high_kl),
        same_promise_charged_ratio=next(
            f.charged_ratio for f in fixed_ratios(traces) if f.high_kl <= target_kl
        ),
    )


def high(values: Sequence[float]) -> float:
    """The least of some values that a share of :data:`CONFIDENCE` of them is not above."""
    ordered = sorted(values)
    return ordered[math.ceil(CONFIDENCE * len(ordered)) - 1]


def _charged_at(fixed: Sequence[FixedRatio], high_kl: float) -> float | None:
    """What the fixed ratio costs that comes as close: linear in cost against the logarithm."""
    for lower, upper in itertools.pairwise(fixed):
        if upper.high_kl <= high_kl <= lower.high_kl:
            if upper.high_kl <= 0 or upper.high_kl == lower.high_kl:
                return upper.charged_ratio
            share = math.log(lower.high_kl / high_kl) / math.log(lower.high_kl / upper.high_kl)
            return lower.charged_ratio + share * (upper.charged_ratio - lower.charged_ratio)
    return None
