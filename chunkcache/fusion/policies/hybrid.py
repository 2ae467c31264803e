"""``hybrid``: first tokens of every chunk and the question's attention, under one budget. Ours."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from chunkcache.errors import InvalidValueError
from chunkcache.fusion.policy import (
    Candidates,
    Policy,
    RowSelection,
    check_ratio,
    resolve_layers,
    rows_of_ratio,
    top,
    top_of_chunks,
)


@dataclass(frozen=True)
class Hybrid(Policy):
    """Run the first tokens of each chunk, and fill the budget by the question's attention.

    Attributes:
        ratio: Share of the candidates, first tokens included.
        first_tokens: Tokens at each chunk's start that are preferred over any other. A budget too
            small for all of them takes the first token of every chunk before any second one.
        layers: Layers of the attention signal.
        chunk_floor: Share of the ratio that every chunk gets, its first tokens included.
    """

    ratio: float
    first_tokens: int = 4
    layers: str = "upper"
    chunk_floor: float = 0.5

    name: ClassVar[str] = "hybrid"

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        check_ratio(self.ratio)
        check_ratio(self.chunk_floor, "chunk_floor")
        if self.first_tokens < 0:
            raise InvalidValueError("first_tokens is negative", param="first_tokens")

    def check(self, num_layers: int) -> None:
        """The layers are the model's."""
        resolve_layers(self.layers, num_layers)

    def select(self, candidates: Candidates) -> RowSelection:
        """First tokens before all, then the top of the signal."""
        num_rows = rows_of_ratio(self.ratio, candidates.num_candidates)
        offsets = candidates.offset_in_chunk
        is_first = offsets < self.first_tokens
        if num_rows <= int(is_first.sum()):
            scores = torch.where(is_first, -offsets, -(1 << 40))
            return RowSelection(top(scores, num_rows))
        layers = resolve_layers(self.layers, candidates.num_layers)
        if num_rows == candidates.num_candidates:
            return RowSelection(torch.ones_like(is_first))
        scores = candidates.query_attention(layers, "sum").masked_fill(is_first, float("inf"))
        floor_ratio = self.chunk_floor * self.ratio
        return RowSelection(top_of_chunks(scores, candidates.chunk_of, num_rows, floor_ratio))

    @property
    def nominal_ratio(self) -> float:
        """The ratio."""
        return self.ratio

    def __str__(self) -> str:
        return (
            f"hybrid({self.ratio:g}, first={self.first_tokens}, layers={self.layers}, "
            f"chunk_floor={self.chunk_floor:g})"
        )
