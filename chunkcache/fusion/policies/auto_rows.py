"""The row sets that ``auto`` chooses from, and what it sees of each: the same in calibration.

All that it sees comes from the probe that ``hybrid`` runs anyway: a look costs nothing.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from chunkcache.fusion.policies.hybrid import Hybrid
from chunkcache.fusion.policy import Candidates, resolve_layers

_LEAST_SHARE: Final = 1e-6


@dataclass(frozen=True)
class RowSet:
    """Rows of ``hybrid`` at one ratio.

    Attributes:
        ratio: The ratio.
        chosen: bool ``[C]``.
        signals: The logarithm of the share of the question's attention to the candidates that goes
            to those left stale. How many candidates and chunks there are was tried and told nothing.
    """

    ratio: float
    chosen: torch.Tensor
    signals: tuple[float, ...]


def row_sets(candidates: Candidates, ratios: Sequence[float]) -> Iterator[RowSet]:
    """The row sets of some ratios, one by one. The probe runs once.

    Args:
        candidates: What there is to choose from, at least one.
        ratios: Each within 0 and 1.
    """
    layers = resolve_layers(Hybrid(0.0).layers, candidates.num_layers)
    scores = candidates.query_attention(layers, "sum")
    known = replace(candidates, query_attention=lambda layers, how: scores)
    total = float(scores.sum())
    for ratio in ratios:
        chosen = Hybrid(ratio).select(known).chosen
        stale_share = float(scores[~chosen].sum()) / total if total > 0 else 1.0
        signals = (math.log(max(stale_share, _LEAST_SHARE)),)
        yield RowSet(ratio, chosen, signals)
