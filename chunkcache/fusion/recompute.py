"""The executor: run any set of rows through the layers, over paged keys and values.

One executor serves the plain forward, the isolated prefill, probes and every policy; they differ
only in which rows they run and what they do between projection and attention. At each layer the
fresh keys and values of the running rows are written **before** the layer attends, and attention
masks by position, so a row sees exactly the slots at or before its own position.
"""

from collections import deque
from collections.abc import Callable, Iterator
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
    """Run rows through all layers, one layer per step.

    Every slot at a position up to the largest running row must hold finite keys and values before
    the layer attends: from placing, from earlier rows, or written by this call.

    Args:
        runner: The model.
        sequence: Where keys and values are; those of the running rows are overwritten.
        token_ids: int64 ``[num_tokens]`` of the whole sequence.
        rows: Positions to run, ascending and distinct, at least one.
        cost: Charged with every row of every layer that is run.
        hook: See :data:`Hook`. If it leaves no row, the run ends with that layer.
        mask_positions: See :data:`MaskPositions`.

    Yields:
        None after each layer but the last, then the result (an empty one if the hook stopped it).
    """
    spec = runner.spec
    hidden = runner.embed(token_ids[rows])
    rotary = sequence.rotary.take(rows)
    slots = sequence.keys.slots[rows]
    for layer in range(spec.num_layers):
        q, k_before_rope, v = runner.project(layer, hidden)
        cost.charge(len(rows))
        tables = rotary.for_layer(layer)
        if tables is None:
            k = k_before_rope
        else:
            q, k = rotate(q, *tables), rotate(k_before_rope, *tables)
        keep = hook(LayerRows(layer, rows, q, k_before_rope, k, v)) if hook is not None else None
        flat_slots(sequence.k_pages[layer]).index_copy_(0, slots, k)
        flat_slots(sequence.v_pages[layer]).index_copy_(0, slots, v)
        if keep is not None:
            rows, hidden, q, rotary = rows[keep], hidden[keep], q[keep], rotary.take(keep)
            slots = slots[keep]
            if not len(rows):
                yield RowsResult(rows, hidden)
                return
        attended = attend_rows(
            q,
            sequence.k_pages[layer],
            sequence.v_pages[layer],
            sequence.keys,
            rows if mask_positions is None else mask_positions(rows, len(sequence.keys)),
            scale=spec.scale,
            window=spec.windows[layer],
            softcap=spec.attention_softcap,
        )
        hidden = runner.finish(layer, hidden, attended)
        if layer + 1 < spec.num_layers:
            yield None
    yield RowsResult(rows, hidden)


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
