"""Placing: an entry is dequantised, its keys are rotated, and both are scattered into pages."""

import torch

from chunkcache.entry import Entry
from chunkcache.fusion.recompute import SequenceKV
from chunkcache_kernels.place.op import place


def place_entry(sequence: SequenceKV, entry: Entry, start: int) -> None:
    """Write an entry at positions ``start ..``; the entry itself is only read.

    Args:
        sequence: The destination.
        entry: Encoded keys and values.
        start: Position of the entry's first token.
    """
    where = slice(start, start + entry.num_tokens)
    rotary = sequence.rotary.take(where)
    device = sequence.k_pages.device
    place(
        _to(entry.k, device),
        _to(entry.v, device),
        rotary.cos,
        rotary.sin,
        rotary.table_of_layer,
        sequence.k_pages,
        sequence.v_pages,
        sequence.keys.slots[where],
        scales=None if entry.scales is None else entry.scales.to(device),
    )


def _to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor if tensor.device == device else tensor.to(device)
