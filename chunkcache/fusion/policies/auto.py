"""``auto``: the smallest row set of ``hybrid`` that is as close as the caller asked for. Ours.

The question's attention is known from the probe before anything is recomputed. The share of it that
a row set leaves to stale tokens tells how far off the answer will be: to first order, an error is
what stale tokens are off by, weighted by the attention to them. A table fitted on questions whose
full prefill is known turns that share into a bound with a split conformal margin (Lei et al.,
arXiv:1604.04173) over the largest residual of each question, so that the bound holds whatever is
chosen. Where no set is taken to be close enough, every row runs.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch

from chunkcache.errors import InvalidValueError
from chunkcache.estimate import EstimateReport
from chunkcache.fusion.policies.auto_rows import row_sets
from chunkcache.fusion.policies.auto_table import AutoTable
from chunkcache.fusion.policies.hybrid import Hybrid
from chunkcache.fusion.policy import Candidates, Policy, RowSelection, resolve_layers

DEFAULT_TARGET_KL: Final = 0.02


@dataclass(frozen=True)
class Auto(Policy):
    """Run the smallest of some row sets with which the answer is taken to meet a target.

    Attributes:
        target_kl: Mean KL divergence of the answer from the full prefill's, in nats, over the
            leading tokens of the full prefill's answer.
        table: What is known of the model; None until it is looked up.
    """

    target_kl: float = DEFAULT_TARGET_KL
    table: AutoTable | None = None

    name: ClassVar[str] = "auto"

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        if not (math.isfinite(self.target_kl) and self.target_kl > 0):
            raise InvalidValueError(
                f"target_kl {self.target_kl:g} is not above 0; the policy `full` is exact",
                param="target_kl",
            )

    def with_table(self, table: AutoTable) -> "Auto":
        """The policy for the model of a table."""
        return replace(self, table=table)

    def check(self, num_layers: int) -> None:
        """The layers that the row sets are chosen by are the model's."""
        resolve_layers(Hybrid(0.0).layers, num_layers)

    def select(self, candidates: Candidates) -> RowSelection:
        """The first row set, by ratio, whose bound is within the target; else everything."""
        table = self.table
        assert table is not None, "the table was not looked up"
        if not candidates.num_candidates:
            return RowSelection(torch.zeros_like(candidates.positions, dtype=torch.bool))
        signals: tuple[float, ...] = ()
        for index, rows in enumerate(row_sets(candidates, table.ratios)):
            signals = rows.signals
            bound = table.bound(index, signals)
            if bound <= self.target_kl:
                report = EstimateReport(self.target_kl, bound, rows.ratio, False, signals)
                return RowSelection(rows.chosen, estimate=report)
        everything = torch.ones_like(candidates.positions, dtype=torch.bool)
        report = EstimateReport(self.target_kl, 0.0, 1.0, True, signals)
        return RowSelection(everything, estimate=report)

    def __str__(self) -> str:
        return f"auto({self.target_kl:g})"
