"""The CPU path of ``place``: few large torch calls, scratch buffers made once.

Work is cut into blocks of tokens x consecutive layers with one rotation, large enough to pay for
a torch call and small enough that a block's fp32 keys stay in the cache between the three passes
of a rotation. Slots are written as consecutive runs, a copy each (ten times faster than an indexed
write when pages are scattered); only slots without runs are written by index.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from chunkcache_kernels.paged import Span, clip, flat_slots, spans_of
from chunkcache_kernels.rotate import rotate_into

BLOCK_ELEMENTS = 1 << 18
MIN_RUN_TOKENS = 4


def place_cpu(
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    rope_table: tuple[int, ...],
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    interleaved: bool,
) -> None:
    """See ``chunkcache_kernels.place.op.place``."""
    k_slots, v_slots = flat_slots(k_pages), flat_slots(v_pages)
    num_tokens = k.shape[1]
    spans = spans_of(slots)
    if len(spans) * MIN_RUN_TOKENS > num_tokens and len(spans) > 1:
        spans = None
    _write(v_slots, v, 0, slots, spans)

    row_elements = k.shape[2] * k.shape[3]
    block_tokens = min(num_tokens, max(1, BLOCK_ELEMENTS // row_elements))
    block_layers = max(1, BLOCK_ELEMENTS // (block_tokens * row_elements))
    scratch = torch.empty(2, min(block_layers, k.shape[0]), block_tokens, *k.shape[2:])

    for layers, row in _layer_blocks(rope_table, block_layers):
        if row < 0:
            _write(k_slots[layers], k[layers], 0, slots, spans)
            continue
        for first in range(0, num_tokens, block_tokens):
            tokens = slice(first, min(first + block_tokens, num_tokens))
            keys = k[layers, tokens]
            source, rotated = scratch[:, : keys.shape[0], : keys.shape[1]]
            source.copy_(keys)
            if spans is not None and len(spans) == 1 and k_slots.dtype == torch.float32:
                start = spans[0].first_slot
                target = k_slots[layers, start + tokens.start : start + tokens.stop]
                rotate_into(target, source, cos[row, tokens], sin[row, tokens], interleaved)
            else:
                rotate_into(rotated, source, cos[row, tokens], sin[row, tokens], interleaved)
                _write(k_slots[layers], rotated, first, slots, spans)


def _write(
    target: Tensor, rows: Tensor, first: int, slots: Tensor, spans: tuple[Span, ...] | None
) -> None:
    """Write rows ``[L, n, Hkv, D]`` of tokens ``first..first + n`` into slots ``[L, P*S, ...]``."""
    end = first + rows.shape[1]
    if spans is None:
        target.index_copy_(1, slots[first:end], rows.to(target.dtype))
        return
    for span in clip(spans, first, end):
        num_slots = span.end - span.start
        target[:, span.first_slot : span.first_slot + num_slots].copy_(
            rows[:, span.start - first : span.end - first]
        )


def _layer_blocks(rope_table: tuple[int, ...], block_layers: int) -> Iterator[tuple[slice, int]]:
    """Yield runs of at most ``block_layers`` layers that share a row of ``rope_table``."""
    first = 0
    for layer in range(1, len(rope_table) + 1):
        full = layer - first == block_layers
        if layer == len(rope_table) or full or rope_table[layer] != rope_table[first]:
            yield slice(first, layer), rope_table[first]
            first = layer
