"""``random``: a control for the evaluation."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from chunkcache.fusion.policy import (
    Candidates,
    Policy,
    RowSelection,
    check_ratio,
    rows_of_ratio,
    top,
)


@dataclass(frozen=True)
class Random(Policy):
    """Run a uniformly drawn ``ratio`` of the candidates; the same ``seed`` draws the same rows."""

    ratio: float
    seed: int = 0

    name: ClassVar[str] = "random"

    def __post_init__(self) -> None:
        """A ratio."""
        check_ratio(self.ratio)

    def select(self, candidates: Candidates) -> RowSelection:
        """Draw."""
        generator = torch.Generator().manual_seed(self.seed)
        scores = torch.rand(candidates.num_candidates, generator=generator)
        num_rows = rows_of_ratio(self.ratio, candidates.num_candidates)
        return RowSelection(top(scores.to(candidates.positions.device), num_rows))

    @property
    def nominal_ratio(self) -> float:
        """The ratio."""
        return self.ratio

    def __str__(self) -> str:
        return f"random({self.ratio:g}, seed={self.seed})"
