"""The executor: run any set of rows through the layers, over paged keys and values.

One executor serves the plain forward, the isolated prefill, probes and every policy; they differ
only in which rows they run and what they do between projection and attention. At each layer the
fresh keys and values of the running rows are written **before** the layer attends, and attention
masks by position, so a row sees exactly the slots at or before its own position.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from chunkcache.fusion.cost import CostMeter
from chunkcache.model.rotary import RotaryTables
from chunkcache.model.runner import ModelRunner
from chunkcache_kernels.attend_rows.op import attend_rows
from chunkcache_kernels.paged import KeySlots, flat_slots
from chunkcache_kernels.rotate import rotate


@dataclass(frozen=True)
class SequenceKV:
    """One sequence's slots in page tensors.

    Attributes:
        k_pages: ``[num_layers, P, S, num_kv_heads, head_dim]``, rotated keys.
        v_pages: Same shape.
        keys: Slot and position of each token; token ``t`` is at position ``t``.
        rotary: Tables of positions ``0 .. num_tokens - 1``.
    """

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    keys: KeySlots
    rotary: RotaryTables

    @classmethod
    def over(
        cls,
        runner: ModelRunner,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        slots: torch.Tensor,
    ) -> "SequenceKV":
        """Build from the slots ``[num_tokens]`` of a sequence."""
        positions = torch.arange(len(slots), device=slots.device)
        return cls(
            k_pages, v_pages, KeySlots.of(slots, positions), runner.rotary.tables(len(slots))
        )

    @classmethod
    def alone(
        cls,
        runner: ModelRunner,
        num_tokens: int,
        *,
        start: int = 0,
        length_tokens: int | None = None,
    ) -> "SequenceKV":
        """Pages of their own for a stretch of a sequence, in no pool.

        Args:
            runner: The model.
            num_tokens: Tokens of the stretch.
            start: Position of the first of them.
            length_tokens: Length of the whole sequence; None is ``start + num_tokens``.
        """
        spec = runner.spec
        shape = (spec.num_layers, 1, num_tokens, spec.num_kv_heads, spec.head_dim)
        k, v = (torch.empty(shape, dtype=runner.dtype, device=runner.device) for _ in range(2))
        slots = torch.arange(num_tokens, device=runner.device)
        end = start + num_tokens
        rotary = runner.rotary.between(start, end, length_tokens or end)
        return cls(k, v, KeySlots.of(slots, slots + start), rotary)


@dataclass(frozen=True)
class LayerRows:
    """What a hook sees of one layer, after projection and before anything is written.

    Attributes:
        layer: Layer index.
        rows: Positions of the running rows, ascending int64 ``[R]``.
        q: ``[R, num_heads, head_dim]``, rotated.
        k_before_rope: ``[R, num_kv_heads, head_dim]``.
        k: Same shape, rotated.
        v: Same shape.
    """

    layer: int
    rows: torch.Tensor
    q: torch.Tensor
    k_before_rope: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


Hook = Callable[[LayerRows], torch.Tensor | None]
"""Called at each layer; returns which rows go on (int64 indices into ``rows``, ascending), or None
for all. Rows that stop have their fresh keys and values of this layer written all the same."""

MaskPositions = Callable[[torch.Tensor, int], torch.Tensor]
"""From rows and the number of tokens to the positions that the rows are masked at, ascending.
Without one they are masked at their own, which alone is right: the seam is for measuring masks
that are not."""


@dataclass(frozen=True)
class RowsResult:
    """Hidden states behind the last layer of the rows that got there.

    Attributes:
        rows: Their positions, ascending.
        hidden: ``[len(rows), hidden]``.
    """

    rows: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True)
class RowsToRun:
    """Rows of one sequence.

    Attributes:
        sequence: Where keys and values are; those of the running rows are overwritten.
        token_ids: int64 ``[num_tokens]`` of the whole sequence.
        rows: Positions to run, ascending and distinct, at least one.
        hook: See :data:`Hook`.
        mask_positions: See :data:`MaskPositions`.
    """

    sequence: SequenceKV
    token_ids: torch.Tensor
    rows: torch.Tensor
    hook: Hook | None = None
    mask_positions: MaskPositions | None = None


def run_rows(
    runner: ModelRunner,
    sequence: SequenceKV,
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    *,
    cost: CostMeter,
    hook: Hook | None = None,
    mask_positions: MaskPositions | None = None,
) -> Iterator[RowsResult | None]:
    """Run rows of one sequence through all layers, one layer per step.

    Every slot at a position up to the largest running row must hold finite keys and values before
    the layer attends: from placing, from earlier rows, or written by this call. The arguments are
    the fields of :class:`RowsToRun`, and those of :func:`run_packed`. If the hook leaves no row,
    the run ends with that layer.

    Yields:
        None after each layer but the last, then the result (an empty one if the hook stopped it).
    """
    part = RowsToRun(sequence, token_ids, rows, hook, mask_positions)
    for results in run_packed(runner, [part], cost=cost):
        yield None if results is None else results[0]


def run_packed(
    runner: ModelRunner, parts: Sequence[RowsToRun], *, cost: CostMeter
) -> Iterator[list[RowsResult] | None]:
    """Run rows of several sequences through all layers, one layer per step.

    They share the products of a layer, which are quicker for many rows; each attends on its own.
    A sequence's keys and values of a layer are written just before it attends, so that sequences
    may share slots that none of them reads in a later layer.

    Args:
        runner: The model.
        parts: What to run, at least one.
        cost: Charged with every row of every layer that is run.

    Yields:
        None after each layer but the last that any row gets to, then the results in the order of
        the parts.
    """
    hidden = runner.embed(torch.cat([part.token_ids[part.rows] for part in parts]))
    running = [_Running(part) for part in parts]
    for layer in range(runner.spec.num_layers):
        q, k_before_rope, v = runner.project(layer, hidden)
        cost.charge(len(hidden))
        sizes = [len(part.rows) for part in running]
        attended, kept = [], []
        first = 0
        for part, *own in zip(
            running, q.split(sizes), k_before_rope.split(sizes), v.split(sizes), strict=True
        ):
            keep = part.write(layer, *own)
            kept.append(None if keep is None else keep + first)
            first += len(own[0])
            attended.append(part.attend(runner, layer))
        if any(keep is not None for keep in kept):
            every = torch.arange(len(hidden), device=hidden.device).split(sizes)
            hidden = hidden[
                torch.cat([e if k is None else k for e, k in zip(every, kept, strict=True)])
            ]
            if not len(hidden):
                break
        hidden = runner.finish(
            layer, hidden, attended[0] if len(attended) == 1 else torch.cat(attended)
        )
        if layer + 1 < runner.spec.num_layers:
            yield None
    rows = [part.rows for part in running]
    yield [
        RowsResult(r, h) for r, h in zip(rows, hidden.split([len(r) for r in rows]), strict=True)
    ]


class _Running:
    """The rows of one sequence on their way through the layers."""

    def __init__(self, part: RowsToRun) -> None:
        self.rows = part.rows
        self._part = part
        self._rotary = part.sequence.rotary.take(part.rows)
        self._slots = part.sequence.keys.slots[part.rows]
        self._q = torch.empty(0)

    def write(
        self, layer: int, q: torch.Tensor, k_before_rope: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor | None:
        """Rotate and write what a layer projected; returns which rows go on, None for all."""
        sequence, hook = self._part.sequence, self._part.hook
        tables = self._rotary.for_layer(layer)
        if tables is None:
            k = k_before_rope
        else:
            q, k = rotate(q, *tables), rotate(k_before_rope, *tables)
        keep = None
        if hook is not None:
            keep = hook(LayerRows(layer, self.rows, q, k_before_rope, k, v))
        flat_slots(sequence.k_pages[layer]).index_copy_(0, self._slots, k)
        flat_slots(sequence.v_pages[layer]).index_copy_(0, self._slots, v)
        if keep is not None:
            self.rows, q, self._rotary = self.rows[keep], q[keep], self._rotary.take(keep)
            self._slots = self._slots[keep]
        self._q = q
        return keep

    def attend(self, runner: ModelRunner, layer: int) -> torch.Tensor:
        """Attention of the rows that go on, ``[len(rows), num_heads, head_dim]``."""
        if not len(self.rows):
            return self._q
        spec, sequence, rows = runner.spec, self._part.sequence, self.rows
        masked_at = self._part.mask_positions
        return attend_rows(
            self._q,
            sequence.k_pages[layer],
            sequence.v_pages[layer],
            sequence.keys,
            rows if masked_at is None else masked_at(rows, len(sequence.keys)),
            scale=spec.scale,
            window=spec.windows[layer],
            softcap=spec.attention_softcap,
        )


def finish_rows(steps: Iterator[RowsResult | None]) -> RowsResult:
    """Run all steps of :func:`run_rows` at once."""
    (result,) = deque(steps, maxlen=1)
    assert result is not None
    return result


def only_rows_from(num_layers: int, first: int) -> Hook:
    """A hook that leaves positions from ``first`` on at the last layer: others end there."""

    def hook(layer_rows: LayerRows) -> torch.Tensor | None:
        if layer_rows.layer < num_layers - 1:
            return None
        return torch.nonzero(layer_rows.rows >= first).flatten()

    return hook
