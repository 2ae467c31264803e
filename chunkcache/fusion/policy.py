"""The contract of a recompute policy: it names rows, one executor runs them.

A policy sees the prompt's candidates (the tokens of placed chunks, at their final positions) and
signals about them, and says which are run again. Template, question and missing rows always run.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from chunkcache.errors import InvalidValueError
from chunkcache.estimate import EstimateReport

Aggregation = Literal["sum", "l2"]
ShiftScope = Literal["prompt", "chunk"]
"""Whose offsets count for a row: all, or those of its own chunk (without any, it is not moved)."""
QueryAttention = Callable[[tuple[int, ...], Aggregation], torch.Tensor]


@dataclass(frozen=True)
class Candidates:
    """What a policy may choose from.

    Attributes:
        positions: int64 ``[C]``, ascending: the tokens of placed chunks that are not exact.
        chunk_of: int64 ``[C]``: which chunk of the prompt each belongs to.
        offset_in_chunk: int64 ``[C]``: index of each token in its chunk.
        num_layers: Layers of the model.
        query_attention: Attention mass ``[C]`` that the question's rows give each candidate, over
            some layers, with an aggregation. Runs the probe the first time; charged then.
    """

    positions: torch.Tensor
    chunk_of: torch.Tensor
    offset_in_chunk: torch.Tensor
    num_layers: int
    query_attention: QueryAttention

    @property
    def num_candidates(self) -> int:
        """How many there are."""
        return len(self.positions)


@dataclass(frozen=True)
class Narrowing:
    """A second choice, made inside the executor by the deviation of fresh from stale values.

    Attributes:
        layer: Layer at whose projection the choice is made, at least 1 (layer 0 is exact).
        num_rows: How many candidates go on from there.
        shift: Whether, in each later layer, those that do not go on are moved by the mean offset
            of those that do, and of which.
    """

    layer: int
    num_rows: int
    shift: ShiftScope | None = None

    def __post_init__(self) -> None:
        """Layer 0's keys and values are exact by construction; they say nothing."""
        if self.layer < 1:
            raise InvalidValueError("deviation at layer 0 is zero by construction", param="layer")


@dataclass(frozen=True)
class RowSelection:
    """A policy's answer.

    Attributes:
        chosen: bool ``[C]``: candidates that run from layer 0.
        narrowing: A later choice among them, if any.
        estimate: What the policy takes the answer for, if it has a target.
    """

    chosen: torch.Tensor
    narrowing: Narrowing | None = None
    estimate: EstimateReport | None = None


@dataclass(frozen=True)
class Policy(ABC):
    """A rule that selects which chunk tokens are recomputed.

    Class attributes:
        name: Stable name, in requests and reports.
        places_entries: False for ``full``, which runs every row and reads no entry.
        is_exact: Whether the answer is a full prefill's by construction.
        is_question_blind: Whether a row is chosen by its place in its chunk alone, and each on its
            own. Rows then run in stages that end where another question or turn may go on.
    """

    name: ClassVar[str]
    places_entries: ClassVar[bool] = True
    is_exact: ClassVar[bool] = False
    is_question_blind: ClassVar[bool] = False

    @abstractmethod
    def select(self, candidates: Candidates) -> RowSelection:
        """Choose rows. Must be a function of its argument and the policy's own fields alone."""

    def check(self, num_layers: int) -> None:
        """Refuse parameters that do not fit a model, before any work; by default all fit.

        Raises:
            InvalidValueError: They do not.
        """
        assert num_layers > 0

    @property
    def nominal_ratio(self) -> float | None:
        """The share of candidates asked for, for policies that have one."""
        return None

    def __str__(self) -> str:
        return self.name


def check_ratio(ratio: float, param: str = "recompute_ratio") -> None:
    """A ratio is within [0, 1].

    Args:
        ratio: The value.
        param: What a caller knows it as.

    Raises:
        InvalidValueError: It is not.
    """
    if not 0.0 <= ratio <= 1.0:
        raise InvalidValueError(f"{param} {ratio} is not within 0 and 1", param=param)


def rows_of_ratio(ratio: float, num_candidates: int) -> int:
    """How many candidates a ratio stands for: rounded half up, so 0 and 1 mean none and all."""
    return int(ratio * num_candidates + 0.5)


def top(scores: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Bool ``[C]``: the ``num_rows`` highest scores; ties go to the lower position.

    Args:
        scores: ``[C]``.
        num_rows: 0 to C.
    """
    order = torch.sort(scores, descending=True, stable=True).indices
    chosen = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    chosen[order[:num_rows]] = True
    return chosen


def top_of_chunks(
    scores: torch.Tensor, chunk_of: torch.Tensor, num_rows: int, floor_ratio: float
) -> torch.Tensor:
    """Bool ``[C]``: the highest scores, but at least a share of every chunk.

    A question attends to what stands near it, whatever that says: without a floor, most rows go
    to the last chunks of the prompt.

    Args:
        scores: ``[C]``.
        chunk_of: int64 ``[C]``, ascending: whose each is.
        num_rows: 0 to C.
        floor_ratio: Share of its own tokens that each chunk gets, rounded down; all floors
            together are at most ``num_rows``.
    """
    order = torch.sort(scores, descending=True, stable=True).indices
    by_chunk = order[torch.sort(chunk_of[order], stable=True).indices]
    sizes = torch.unique_consecutive(chunk_of, return_counts=True)[1]
    starts = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    floors = torch.repeat_interleave((sizes * floor_ratio).floor(), sizes)
    rank = torch.arange(len(scores), device=scores.device) - starts
    first = by_chunk[rank < floors]
    return top(scores.index_fill(0, first, float("inf")), num_rows)


def resolve_layers(layers: str, num_layers: int) -> tuple[int, ...]:
    """Layer indices behind a description.

    Args:
        layers: ``all``, ``upper`` (the third that begins in the middle), ``late`` (the last
            third), ``last``, or ``a-b`` (both included).
        num_layers: Layers of the model.

    Raises:
        InvalidValueError: Another word, or a range outside the model.
    """
    if layers == "all":
        return tuple(range(num_layers))
    num_third = max(1, num_layers // 3)
    if layers == "upper":
        return tuple(range(num_layers // 2, num_layers // 2 + num_third))
    if layers == "late":
        return tuple(range(num_layers - num_third, num_layers))
    if layers == "last":
        return (num_layers - 1,)
    first, dash, last = layers.partition("-")
    if dash and first.isdigit() and last.isdigit() and int(first) <= int(last) < num_layers:
        return tuple(range(int(first), int(last) + 1))
    raise InvalidValueError(
        f"layers {layers!r} is not all, upper, late, last or a range a-b within 0-{num_layers - 1}",
        param="layers",
    )
