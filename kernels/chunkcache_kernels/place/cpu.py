"""The CPU path of ``place``: few large torch calls, scratch memory made once.

Work is cut into blocks of tokens x consecutive layers with one rotation, large enough to pay for
a torch call and small enough that a block's fp32 numbers stay in the cache between the passes over
it: widen, multiply by scales, rotate. No block is widened that need not be: fp32 entries are read
where they lie, and no entry is ever held in fp32 as a whole. Slots are written as consecutive runs,
a copy each (ten times faster than an indexed write when pages are scattered); only slots without
runs are written by index.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from chunkcache_kernels.paged import Span, clip, flat_slots, spans_of
from chunkcache_kernels.quantised import Scales
from chunkcache_kernels.rotate import rotate_into

BLOCK_ELEMENTS = 1 << 19
"""Elements of a block: below, the calls cost more than the work; above, the cache is too small."""
MIN_RUN_TOKENS = 4
E4M3_AS_HALF = 2.0**8
"""How much smaller a number is whose e4m3 bits stand at their places in an fp16 number: the two
types' exponents have other biases."""


@dataclass(frozen=True)
class _Target:
    """Where the tokens go.

    Attributes:
        slots: Flat slot of each token ``[T]``.
        spans: Its runs; None to write by index.
    """

    slots: Tensor
    spans: tuple[Span, ...] | None

    def write(self, pages: Tensor, rows: Tensor, first: int) -> None:
        """Write rows ``[l, n, Hkv, D]`` of tokens ``first..first + n`` into pages ``[l, P*S, ..]``."""
        end = first + rows.shape[1]
        if self.spans is None:
            pages.index_copy_(1, self.slots[first:end], rows.to(pages.dtype))
            return
        for span in clip(self.spans, first, end):
            num_slots = span.end - span.start
            pages[:, span.first_slot : span.first_slot + num_slots].copy_(
                rows[:, span.start - first : span.end - first]
            )

    def is_view(self, pages: Tensor) -> bool:
        """Whether results can be computed where they are to lie."""
        return self.spans is not None and len(self.spans) == 1 and pages.dtype == torch.float32

    def view(self, pages: Tensor, tokens: slice) -> Tensor | None:
        """The tokens' slots ``[l, n, Hkv, D]`` to compute into, if that can be."""
        if self.spans is None or not self.is_view(pages):
            return None
        start = self.spans[0].first_slot
        return pages[:, start + tokens.start : start + tokens.stop]


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
    scales: Scales | None,
) -> None:
    """See ``chunkcache_kernels.place.op.place``."""
    k_slots, v_slots = flat_slots(k_pages), flat_slots(v_pages)
    num_layers, num_tokens, num_heads, head_dim = k.shape
    spans = spans_of(slots)
    by_index = len(spans) * MIN_RUN_TOKENS > num_tokens and len(spans) > 1
    target = _Target(slots, None if by_index else spans)

    block_tokens = max(1, BLOCK_ELEMENTS // (num_heads * head_dim))
    if scales is not None:
        # A block begins where a group does.
        block_tokens = -(-block_tokens // scales.group_tokens) * scales.group_tokens
    block_tokens = min(num_tokens, block_tokens)
    block_layers = max(1, BLOCK_ELEMENTS // (block_tokens * num_heads * head_dim))
    shape = (min(block_layers, num_layers), block_tokens, num_heads, head_dim)
    scratch = torch.empty(shape)
    # Where the pages are one fp32 run of slots, results are computed into them.
    results = scratch if target.is_view(k_slots) else torch.empty(shape)
    rotations = {row for row in rope_table if row >= 0}

    if scales is None:
        target.write(v_slots, v, 0)
    elif k.dtype == torch.float8_e4m3fn:
        scales = Scales(scales.k * E4M3_AS_HALF, scales.v * E4M3_AS_HALF, scales.group_tokens)
    for first in range(0, num_tokens, block_tokens):
        tokens = slice(first, min(first + block_tokens, num_tokens))
        angles = {row: _angles_of_heads(cos, sin, row, tokens, num_heads) for row in rotations}
        for layers, row in _layer_blocks(rope_table, block_layers):
            block = slice(layers.stop - layers.start), slice(tokens.stop - tokens.start)
            wide, rotated = scratch[block], results[block]
            keys = k[layers, tokens]
            if scales is not None:
                _widen(wide, v[layers, tokens])
                factors = scales.v[layers, tokens, :, None]
                view = target.view(v_slots[layers], tokens)
                torch.mul(wide, factors, out=wide if view is None else view)
                if view is None:
                    target.write(v_slots[layers], wide, first)
                _widen(wide, keys)
                _scale_keys(wide, scales, layers, tokens)
                keys = wide
            if row < 0:
                target.write(k_slots[layers], keys, first)
                continue
            if keys.dtype != torch.float32:
                keys = wide.copy_(keys)
            view = target.view(k_slots[layers], tokens)
            rotate_into(rotated if view is None else view, keys, *angles[row], interleaved)
            if view is None:
                target.write(k_slots[layers], rotated, first)


def _angles_of_heads(
    cos: Tensor, sin: Tensor, row: int, tokens: slice, num_heads: int
) -> tuple[Tensor, Tensor]:
    """The tokens' cosines and sines of one rotation, repeated for each head: ``[n, H, Drot]``."""
    return (
        cos[row, tokens, None].expand(-1, num_heads, -1).contiguous(),
        sin[row, tokens, None].expand(-1, num_heads, -1).contiguous(),
    )


def _widen(wide: Tensor, stored: Tensor) -> None:
    """Write int8 numbers into fp32 memory as they are, and e4m3 numbers over ``E4M3_AS_HALF``.

    Torch casts e4m3 one element at a time; as bits of an fp16 number they take a tenth of that.
    """
    if stored.dtype == torch.int8:
        wide.copy_(stored)
        return
    bits = stored.view(torch.int8).to(torch.int16)
    # The sign was extended into the exponent's highest bit, which stays clear.
    wide.copy_(bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16))


def _scale_keys(wide: Tensor, scales: Scales, layers: slice, tokens: slice) -> None:
    """Multiply keys ``[l, n, Hkv, D]``, whose first token begins a group, by their scales."""
    group_tokens = scales.group_tokens
    num_full, num_rest = divmod(wide.shape[1], group_tokens)
    first = tokens.start // group_tokens
    factors = scales.k[layers, first : first + num_full + (num_rest > 0)]
    if num_full:
        whole = wide[:, : num_full * group_tokens]
        whole = whole.view(-1, num_full, group_tokens, *wide.shape[2:])
        whole.mul_(factors[:, :num_full, None])
    if num_rest:
        wide[:, num_full * group_tokens :].mul_(factors[:, num_full:])


def _layer_blocks(rope_table: tuple[int, ...], block_layers: int) -> Iterator[tuple[slice, int]]:
    """Yield runs of at most ``block_layers`` layers that share a row of ``rope_table``."""
    first = 0
    for layer in range(1, len(rope_table) + 1):
        full = layer - first == block_layers
        if layer == len(rope_table) or full or rope_table[layer] != rope_table[first]:
            yield slice(first, layer), rope_table[first]
            first = layer
