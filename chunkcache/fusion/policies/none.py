"""``none``: no chunk row runs. Pure concatenation, the lower bound."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from chunkcache.fusion.policy import Candidates, Policy, RowSelection


@dataclass(frozen=True)
class NoRecompute(Policy):
    """Reuse every chunk as it was prefilled."""

    name: ClassVar[str] = "none"
    is_question_blind: ClassVar[bool] = True

    def select(self, candidates: Candidates) -> RowSelection:
        """None of them."""
        return RowSelection(torch.zeros_like(candidates.positions, dtype=torch.bool))
