"""Owns where the tokens of a sequence lie in pages; knows no operator and no page pool.

A page holds ``S`` slots; slot ``s`` of page ``p`` is the flat slot ``p * S + s``. Pages of one
layer are ``[P, S, Hkv, D]`` and contiguous, so the flat slots are a view ``[P * S, Hkv, D]``.

Both classes are built once per request or batch and shared by all layers: everything that can be
derived from slots and positions is derived here, once, never inside an operator.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from chunkcache_kernels.checks import require, require_dims


def flat_slots(pages: Tensor) -> Tensor:
    """View pages ``[..., P, S, Hkv, D]`` as slots ``[..., P * S, Hkv, D]`` without a copy."""
    return pages.view(*pages.shape[:-4], -1, *pages.shape[-2:])


@dataclass(frozen=True)
class Span:
    """A stretch of tokens whose slots are consecutive.

    Attributes:
        start: Index of the first token.
        end: One past the index of the last token.
        first_slot: Flat slot of token ``start``.
    """

    start: int
    end: int
    first_slot: int


def spans_of(slots: Tensor) -> tuple[Span, ...]:
    """Cut the slots ``[T]`` of tokens ``0..T`` into maximal consecutive ascending runs."""
    if slots.shape[0] == 0:
        return ()
    numbers = slots.numpy(force=True)  # a tenth of the time that torch takes for so few
    breaks = (np.flatnonzero(np.diff(numbers) != 1) + 1).tolist()
    starts = [0, *breaks]
    first_slots = numbers[starts].tolist()
    ends = [*breaks, slots.shape[0]]
    return tuple(Span(*span) for span in zip(starts, ends, first_slots, strict=True))


def clip(spans: Iterable[Span], start: int, end: int) -> tuple[Span, ...]:
    """Cut spans to tokens ``start..end``; token indices stay as they are."""
    return tuple(
        Span(low, high, span.first_slot + low - span.start)
        for span in spans
        if (low := max(start, span.start)) < (high := min(end, span.end))
    )


@dataclass(frozen=True)
class KeySlots:
    """The keys a set of rows may attend to: one slot and one position per token.

    Build it with ``KeySlots.of``. Immutable; the tensors must not be changed afterwards.

    Attributes:
        slots: Flat slot of each key, int64 ``[T]``, distinct.
        positions: Position of each key in the sequence, int64 ``[T]``, distinct.
        start: First slot if the slots are one consecutive ascending run, else ``None``.
        ascending: Whether the positions are strictly ascending.
        memo: What an operator derived for these keys and will be asked for again, layer by layer.
    """

    slots: Tensor
    positions: Tensor
    start: int | None
    ascending: bool
    memo: dict[str, object] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, tensor in (("slots", self.slots), ("positions", self.positions)):
            require_dims(name, tensor, "T")
            require(tensor.dtype == torch.int64, f"{name} must be int64, got {tensor.dtype}")
        require(
            self.slots.shape == self.positions.shape,
            f"{self.slots.shape[0]} slots but {self.positions.shape[0]} positions",
        )

    @classmethod
    def of(cls, slots: Tensor, positions: Tensor) -> "KeySlots":
        """Build from slots and positions, both int64 ``[T]``; derives ``start``, ``ascending``.

        Raises:
            KernelArgumentError: Shapes or types do not fit.
        """
        ascending = bool((positions[1:] > positions[:-1]).all())
        spans = spans_of(slots)
        start = spans[0].first_slot if len(spans) == 1 else None
        return cls(slots, positions, start, ascending)

    def __len__(self) -> int:
        return self.slots.shape[0]

    def prefix(self, n: int) -> "KeySlots":
        """Return the first ``n`` keys, in the order given (not in the order of positions).

        Raises:
            KernelArgumentError: ``n`` is negative or above the number of keys.
        """
        require(0 <= n <= len(self), f"prefix of {n} keys asked from {len(self)}")
        if n == len(self):
            return self
        if n > 0 and self.start is not None and self.ascending:
            return KeySlots(self.slots[:n], self.positions[:n], self.start, True)
        return KeySlots.of(self.slots[:n], self.positions[:n])

    @cached_property
    def by_position(self) -> "KeySlots":
        """The same keys in ascending order of their positions (itself if already so)."""
        if self.ascending:
            return self
        order = torch.argsort(self.positions, stable=True)
        return KeySlots.of(self.slots[order], self.positions[order])

    def read(self, pages: Tensor) -> Tensor:
        """Return one layer's rows ``[T, Hkv, D]`` of these keys from pages ``[P, S, Hkv, D]``.

        A view of the pages when the slots are one run, else a copy; both contiguous.
        """
        flat = flat_slots(pages)
        if self.start is not None:
            return flat[self.start : self.start + len(self)]
        return flat.index_select(0, self.slots)


@dataclass(frozen=True)
class DecodeBatch:
    """The pages and lengths of the sequences of one decode step.

    Logical token ``t`` of sequence ``b`` is at position ``t`` and lies in slot
    ``block_tables[b, t // S] * S + t % S``. A sequence of length 0 is padding. Immutable; the
    tensors must not be changed afterwards.

    Attributes:
        block_tables: Page of each block, int32 ``[B, N]``; entries past a sequence's length are
            never read.
        lengths: Tokens of each sequence, the new one included, int64 ``[B]``.
        page_tokens: Slots per page ``S``.
    """

    block_tables: Tensor
    lengths: Tensor
    page_tokens: int

    def __post_init__(self) -> None:
        require_dims("block_tables", self.block_tables, "B,N")
        require_dims("lengths", self.lengths, "B")
        require(
            self.block_tables.dtype == torch.int32,
            f"block_tables must be int32, got {self.block_tables.dtype}",
        )
        require(
            self.lengths.dtype == torch.int64, f"lengths must be int64, got {self.lengths.dtype}"
        )
        require(self.page_tokens > 0, f"page_tokens must be positive, got {self.page_tokens}")
        require(
            self.block_tables.shape[0] == self.lengths.shape[0],
            f"{self.block_tables.shape[0]} block tables but {self.lengths.shape[0]} lengths",
        )

    @property
    def num_sequences(self) -> int:
        """Number of sequences ``B``, padding included."""
        return self.lengths.shape[0]

    @cached_property
    def lengths_tokens(self) -> tuple[int, ...]:
        """Length of each sequence as plain integers.

        Raises:
            KernelArgumentError: A length is negative or needs more blocks than the table has.
        """
        capacity = self.block_tables.shape[1] * self.page_tokens
        lengths = tuple(int(n) for n in self.lengths.tolist())
        for b, n in enumerate(lengths):
            require(0 <= n <= capacity, f"sequence {b} has {n} tokens, its table holds {capacity}")
        return lengths

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """For each sequence its maximal physically consecutive spans, in logical order."""
        tables = self.block_tables.tolist()
        return tuple(
            _page_spans(table, n, self.page_tokens)
            for table, n in zip(tables, self.lengths_tokens, strict=True)
        )

    @cached_property
    def _located(self) -> dict[tuple[int, int, int], int | Tensor]:
        return {}

    def locate(self, sequence: int, start: int, end: int) -> int | Tensor:
        """Return where logical tokens ``start..end`` of a sequence lie; remembered per batch.

        Returns:
            The first flat slot if the slots are one consecutive run, else all of them, int64
            ``[end - start]``.
        """
        key = (sequence, start, end)
        if key not in self._located:
            self._located[key] = _join(clip(self.spans[sequence], start, end))
        return self._located[key]


def _join(spans: tuple[Span, ...]) -> int | Tensor:
    """The first slot of one span, or every slot of several."""
    if len(spans) == 1:
        return spans[0].first_slot
    runs = [torch.arange(s.first_slot, s.first_slot + s.end - s.start) for s in spans]
    return torch.cat(runs)


def _page_spans(pages: list[int], num_tokens: int, page_tokens: int) -> tuple[Span, ...]:
    spans: list[Span] = []
    start = 0
    for block in range(-(-num_tokens // page_tokens)):
        end = min((block + 1) * page_tokens, num_tokens)
        last_of_run = end == num_tokens or pages[block + 1] != pages[block] + 1
        if last_of_run:
            first_block = start // page_tokens
            spans.append(Span(start, end, pages[first_block] * page_tokens))
            start = end
    return tuple(spans)
