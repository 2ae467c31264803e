"""From traces to a table: weights by least squares, the margin by what they were off by.

Each question is predicted by weights that were fitted without it. Its residual is the largest over
all ratios, so that the bound holds at whichever ratio is chosen, for any target: split conformal
prediction (Lei et al., arXiv:1604.04173). Knows no model.
"""

import math
from collections.abc import Sequence

import torch

from chunkcache.fusion.policies.auto_table import CONFIDENCE, AutoRatio, AutoTable
from chunkcache_eval.auto.trace import Trace

MIN_QUESTIONS = 20
"""Fewer say nothing about nine in ten."""
NUM_FOLDS = 5
_LEAST_KL = 1e-6
_RIDGE = 0.1
"""In questions: what a weight other than the constant is shrunk by."""


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
    *,
    model_name: str,
    preparation: str,
    codec: str,
    fingerprint: str,
) -> AutoTable:
    """Fit weights and the margin.

    Args:
        traces: Of one model, preparation and codec, with the same ratios; at least
            :data:`MIN_QUESTIONS`.
        model_name: Display name.
        preparation: What chunks were prefilled behind.
        codec: How entries were kept.
        fingerprint: Names model, preparation and codec.
    """
    assert len(traces) >= MIN_QUESTIONS
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
        margin=_margin(traces),
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


def _margin(traces: Sequence[Trace]) -> float:
    """What nine questions in ten are off by at most, at the ratio where they are off most."""
    residuals = sorted(
        max(_log(p.mean_kl) - x for p, x in zip(trace.points, row, strict=True))
        for trace, row in zip(traces, _predicted_by_others(traces), strict=True)
    )
    return residuals[math.ceil(CONFIDENCE * (len(traces) + 1)) - 1]


def _log(kl: float) -> float:
    return math.log(max(kl, _LEAST_KL))
