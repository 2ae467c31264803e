"""``full``: every row runs. The exact answer, always offered."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from chunkcache.fusion.policy import Candidates, Policy, RowSelection


@dataclass(frozen=True)
class Full(Policy):
    """Run everything; entries are not even read."""

    name: ClassVar[str] = "full"
    places_entries: ClassVar[bool] = False
    is_exact: ClassVar[bool] = True

    def select(self, candidates: Candidates) -> RowSelection:
        """All of them."""
        return RowSelection(torch.ones_like(candidates.positions, dtype=torch.bool))
