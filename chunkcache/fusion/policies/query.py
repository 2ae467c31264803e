"""``query``: the tokens that the question attends to most run again.

The question's rows alone run through the layers over the stale pages, at final positions.
ProphetKV (arXiv:2602.02579) sums over all layers; InfoFlow-KV (arXiv:2603.05353) takes the L2 norm
over the question rows in a few late layers; FusionRAG (arXiv:2601.12904) looks at the last layer.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from chunkcache.errors import InvalidValueError
from chunkcache.fusion.policy import (
    Aggregation,
    Candidates,
    Policy,
    RowSelection,
    check_ratio,
    resolve_layers,
    rows_of_ratio,
    top_of_chunks,
)


@dataclass(frozen=True)
class Query(Policy):
    """Run the ``ratio`` of candidates with the most attention from the question.

    Attributes:
        ratio: Share of the candidates.
        layers: ``all``, ``upper``, ``late``, ``last`` or ``a-b``.
        aggregation: ``sum`` over heads and question rows, or ``l2`` over question rows of the
            mean over heads.
        chunk_floor: Share of the ratio that every chunk gets, whatever its attention; 0 is the
            methods as published.
    """

    ratio: float
    layers: str = "upper"
    aggregation: Aggregation = "sum"
    chunk_floor: float = 0.5

    name: ClassVar[str] = "query"

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        check_ratio(self.ratio)
        check_ratio(self.chunk_floor, "chunk_floor")
        if self.aggregation not in ("sum", "l2"):
            raise InvalidValueError(
                f"aggregation {self.aggregation!r} is not sum or l2", param="aggregation"
            )

    def check(self, num_layers: int) -> None:
        """The layers are the model's."""
        resolve_layers(self.layers, num_layers)

    def select(self, candidates: Candidates) -> RowSelection:
        """The top of the signal."""
        num_rows = rows_of_ratio(self.ratio, candidates.num_candidates)
        layers = resolve_layers(self.layers, candidates.num_layers)
        if num_rows in (0, candidates.num_candidates):
            return RowSelection(
                torch.full_like(candidates.positions, num_rows > 0, dtype=torch.bool)
            )
        scores = candidates.query_attention(layers, self.aggregation)
        floor_ratio = self.chunk_floor * self.ratio
        return RowSelection(top_of_chunks(scores, candidates.chunk_of, num_rows, floor_ratio))

    @property
    def nominal_ratio(self) -> float:
        """The ratio."""
        return self.ratio

    def __str__(self) -> str:
        return (
            f"query({self.ratio:g}, layers={self.layers}, {self.aggregation}, "
            f"chunk_floor={self.chunk_floor:g})"
        )
