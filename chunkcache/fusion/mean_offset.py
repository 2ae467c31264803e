"""Moving stale rows by what fresh ones were off, layer by layer.

A probe is a candidate that runs. Its offset at a layer is its fresh keys and values less the stale
ones that they replace; the mean of some probes' offsets is added to rows that do not run. Offsets
of keys are taken before RoPE, where those of different positions can be averaged, and the mean is
rotated to each row's own position: a rotation is linear, so that moves the key before RoPE.
"""

import torch

from chunkcache.fusion.policy import ShiftScope
from chunkcache.fusion.recompute import LayerRows, SequenceKV
from chunkcache.fusion.rows import PromptRows
from chunkcache.model.rotary import RotaryTables
from chunkcache_kernels.paged import flat_slots
from chunkcache_kernels.rotate import rotate


class MeanOffset:
    """The candidates of one fusion that do not run, and the probes that say where they move.

    Args:
        sequence: Pages of the request alone.
        rows: The prompt's candidates.
        probes: Positions of those that run, ascending, at least one.
        scope: See :data:`~chunkcache.fusion.policy.ShiftScope`.
    """

    def __init__(
        self, sequence: SequenceKV, rows: PromptRows, probes: torch.Tensor, scope: ShiftScope
    ) -> None:
        groups = rows.chunk_of if scope == "chunk" else torch.zeros_like(rows.chunk_of)
        is_probe = torch.isin(rows.candidates, probes)
        membership = torch.nn.functional.one_hot(groups[is_probe], int(groups.max()) + 1).T.float()
        # [groups, probes]; a matrix product, so that the order of the sum is always the same.
        self._weights = membership / membership.sum(dim=1, keepdim=True).clamp(min=1)
        self._probes = probes
        self._group_of = groups[~is_probe]
        self._sequence = sequence
        moved = rows.candidates[~is_probe]
        self._slots = sequence.keys.slots[moved]
        self._rotary = sequence.rotary.take(moved)
        self._probe_rotary = _inverse(sequence.rotary.take(probes))

    def apply(self, layer_rows: LayerRows) -> None:
        """Move the rows of one layer, before the probes' fresh keys and values are written.

        Args:
            layer_rows: The layer; all probes are among its rows.
        """
        layer = layer_rows.layer
        k_slots = flat_slots(self._sequence.k_pages[layer])
        v_slots = flat_slots(self._sequence.v_pages[layer])
        running = torch.isin(layer_rows.rows, self._probes)
        stale = self._sequence.keys.slots[self._probes]
        k_off = layer_rows.k_before_rope[running].float() - _turned(
            k_slots.index_select(0, stale).float(), self._probe_rotary, layer
        )
        v_off = layer_rows.v[running].float() - v_slots.index_select(0, stale).float()
        self._add(k_slots, _turned(self._mean(k_off), self._rotary, layer))
        self._add(v_slots, self._mean(v_off))

    def _mean(self, offsets: torch.Tensor) -> torch.Tensor:
        """Offsets of probes ``[P, H, D]`` to the mean that each moved row takes ``[M, H, D]``."""
        means = (self._weights @ offsets.flatten(1)).unflatten(1, offsets.shape[1:])
        return means[self._group_of]

    def _add(self, slots: torch.Tensor, offsets: torch.Tensor) -> None:
        moved = slots.index_select(0, self._slots).float() + offsets
        slots.index_copy_(0, self._slots, moved.to(slots.dtype))


def _turned(x: torch.Tensor, rotary: RotaryTables, layer: int) -> torch.Tensor:
    tables = rotary.for_layer(layer)
    return x if tables is None else rotate(x, *tables)


def _inverse(rotary: RotaryTables) -> RotaryTables:
    """Tables that undo a rotation, its attention scaling included."""
    scale = rotary.cos.square() + rotary.sin.square()
    return RotaryTables(rotary.cos / scale, -rotary.sin / scale, rotary.table_of_layer)
