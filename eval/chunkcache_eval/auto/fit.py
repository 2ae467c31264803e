"""From traces to a table: weights by least squares, margins by what the calibration questions meet.

A margin is split conformal, over the whole choice (conformal risk control, arXiv:2208.02814): the
least one with which enough questions meet the target, where each is predicted by weights that were
fitted without it. Knows no model.
"""

import math
from collections.abc import Sequence

import torch

from chunkcache.fusion.policies.auto_table import CONFIDENCE, AutoRatio, AutoTable, AutoTarget
from chunkcache_eval.auto.trace import Trace, chosen_point

MIN_QUESTIONS = 20
"""Fewer say nothing about nine in ten."""
NUM_FOLDS = 5
_LEAST_KL = 1e-6
_RIDGE = 0.1
"""In questions: what a weight other than the constant is shrunk by."""
_MARGINS = tuple(step / 20 for step in range(-60, 121))


def fit_weights(traces: Sequence[Trace]) -> tuple[tuple[float, ...], ...]:
    """Per ratio the weights of 1 and its signals that predict the logarithm of the mean KL.

    Ridge regression in fp64, the constant left alone.
    """
    found = []
    for points in zip(*(t.points for t in traces), strict=True):
        signals = torch.tensor([p.signals for p in points], dtype=torch.float64)
        wanted = torch.tensor([_log(p.mean_kl) for p in points], dtype=torch.float64)
        centre, level = signals.mean(dim=0), wanted.mean()
        x = signals - centre
        gram = x.T @ x + _RIDGE * torch.eye(x.shape[1], dtype=torch.float64)
        weights = torch.linalg.solve(gram, x.T @ (wanted - level))
        constant = level - centre @ weights
        found.append((float(constant), *weights.tolist()))
    return tuple(found)


def fit_table(
    traces: Sequence[Trace],
    targets: Sequence[float],
    *,
    model_name: str,
    preparation: str,
    codec: str,
    fingerprint: str,
) -> AutoTable:
    """Fit weights and margins.

    Args:
        traces: Of one model, preparation and codec, with the same ratios; at least
            :data:`MIN_QUESTIONS`.
        targets: Mean KL divergences in nats, ascending.
        model_name: Display name.
        preparation: What chunks were prefilled behind.
        codec: How entries were kept.
        fingerprint: Names model, preparation and codec.
    """
    assert len(traces) >= MIN_QUESTIONS
    predicted = _predicted_by_others(traces)
    return AutoTable(
        model_name=model_name,
        preparation=preparation,
        codec=codec,
        fingerprint=fingerprint,
        num_questions=len(traces),
        num_context_tokens=max(t.num_context_tokens for t in traces),
        choices=tuple(
            AutoRatio(point.ratio, weights)
            for point, weights in zip(traces[0].points, fit_weights(traces), strict=True)
        ),
        targets=tuple(AutoTarget(t, _margin(traces, predicted, t)) for t in targets),
    )


def _predicted_by_others(traces: Sequence[Trace]) -> list[list[float]]:
    """Per question and ratio the predicted logarithm, by weights of the other folds."""
    predicted: list[list[float]] = [[] for _ in traces]
    for fold in range(NUM_FOLDS):
        weights = fit_weights([t for i, t in enumerate(traces) if i % NUM_FOLDS != fold])
        for index in range(fold, len(traces), NUM_FOLDS):
            predicted[index] = [
                constant + sum(w * x for w, x in zip(slopes, point.signals, strict=True))
                for (constant, *slopes), point in zip(weights, traces[index].points, strict=True)
            ]
    return predicted


def _margin(traces: Sequence[Trace], predicted: Sequence[Sequence[float]], target: float) -> float:
    """The least margin from which on enough questions meet a target."""
    num_needed = math.ceil(CONFIDENCE * (len(traces) + 1))
    least = math.inf
    for margin in reversed(_MARGINS):
        num_met = sum(
            _kl_at(trace, [math.exp(p + margin) for p in row], target) <= target
            for trace, row in zip(traces, predicted, strict=True)
        )
        if num_met < num_needed:
            break
        least = margin
    assert math.isfinite(least), "a margin that runs everything in full meets any target"
    return least


def _kl_at(trace: Trace, bounds: Sequence[float], target: float) -> float:
    point = chosen_point(trace, bounds, target)
    return 0.0 if point is None else point.mean_kl


def _log(kl: float) -> float:
    return math.log(max(kl, _LEAST_KL))
