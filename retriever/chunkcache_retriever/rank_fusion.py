"""Joining several rankings of the same things into one. Knows ranks only, no scores.

Reciprocal rank fusion: G. Cormack, C. Clarke, S. Büttcher, "Reciprocal Rank Fusion outperforms
Condorcet and individual Rank Learning Methods", SIGIR 2009. A thing's score is the sum over the
rankings of ``weight / (k + rank)``, its rank counted from 1; where it is not ranked it gets nothing.
"""

from collections.abc import Sequence
from typing import TypeVar

DEFAULT_K = 60
"""The paper's constant: how little the first places count above the following ones."""

ItemT = TypeVar("ItemT")


def reciprocal_rank_fusion(
    rankings: Sequence[Sequence[ItemT]],
    *,
    k: int = DEFAULT_K,
    weights: Sequence[float] | None = None,
) -> list[tuple[ItemT, float]]:
    """Fuse rankings.

    Args:
        rankings: Each the best first, without repeats; one may be empty.
        k: Not negative.
        weights: One per ranking; all 1 if left out.

    Returns:
        Every item with its score, the best first; equal ones in the order of the first ranking that
        holds them.
    """
    if weights is None:
        weights = [1.0] * len(rankings)
    scores: dict[ItemT, float] = {}
    for ranking, weight in zip(rankings, weights, strict=True):
        for rank, item in enumerate(ranking, 1):
            scores[item] = scores.get(item, 0.0) + weight / (k + rank)
    return sorted(scores.items(), key=lambda scored: -scored[1])
