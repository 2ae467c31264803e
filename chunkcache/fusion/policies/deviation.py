"""``deviation``: the tokens whose values change most at an early layer run on.

After CacheBlend (Yao et al. 2025, EuroSys, arXiv:2405.16444): every row runs layer 0; at the check
layer the squared difference of fresh and stale values picks rows once; later layers run only
those. Unlike the published code, rows are masked by their true positions and all question rows
run.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from chunkcache.fusion.policy import (
    Candidates,
    Narrowing,
    Policy,
    RowSelection,
    check_ratio,
    rows_of_ratio,
)


@dataclass(frozen=True)
class Deviation(Policy):
    """Run the ``ratio`` of candidates with the largest value deviation at ``layer``."""

    ratio: float
    layer: int = 1

    name: ClassVar[str] = "deviation"

    def __post_init__(self) -> None:
        """A ratio, and a layer that can deviate."""
        check_ratio(self.ratio)
        Narrowing(self.layer, 0)

    def select(self, candidates: Candidates) -> RowSelection:
        """All at first (none for a ratio of 0), narrowed at the check layer."""
        num_rows = rows_of_ratio(self.ratio, candidates.num_candidates)
        chosen = torch.full_like(candidates.positions, num_rows > 0, dtype=torch.bool)
        if num_rows in (0, candidates.num_candidates) or self.layer >= candidates.num_layers:
            return RowSelection(chosen)
        return RowSelection(chosen, Narrowing(self.layer, num_rows))

    @property
    def nominal_ratio(self) -> float:
        """The ratio."""
        return self.ratio

    def __str__(self) -> str:
        return f"deviation({self.ratio:g}, layer={self.layer})"
