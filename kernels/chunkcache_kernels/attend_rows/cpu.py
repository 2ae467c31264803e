"""The CPU path of ``attend_rows`` and ``column_mass``.

Rows go in blocks of ``BLOCK_ROWS``. A block reads only the keys between the lower end of its
first row's window and the position of its last row, so memory stays at ``[Hq, 64, T]`` and keys
that no row sees are never touched, which keeps whatever lies there (0 * NaN is NaN) out of the
result. Keys in one run of slots are views; others are gathered once, into the same strides, so
both give the same bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from chunkcache_kernels.masks import masked_softmax, soft_capped, visible
from chunkcache_kernels.paged import KeySlots

BLOCK_ROWS = 64
"""A larger block reads keys that its earlier rows do not see; a smaller one is too little work to
share evenly between two cores (measured: ``docs/experiments.md``)."""


@dataclass(frozen=True)
class _Block:
    """Rows ``rows`` and the keys ``keys`` that any of them may see; ``seen`` None means all.

    ``mask`` is ``seen`` as what is added to scores: 0 or minus infinity.
    """

    rows: slice
    keys: slice
    seen: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True)
class _RowBlocks:
    """The blocks of some rows, for as long as the same rows are asked about."""

    query_positions: Tensor
    dtype: torch.dtype
    blocks: tuple[_Block, ...]


def attend_rows_cpu(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    keys: KeySlots,
    query_positions: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """See ``chunkcache_kernels.attend_rows.op.attend_rows``."""
    keys = keys.by_position
    k = keys.read(k_pages).transpose(0, 1)
    v = keys.read(v_pages).transpose(0, 1)
    queries = q.transpose(0, 1)
    if softcap is None and _is_full_prefill(keys, query_positions, window):
        # Every row reads these again and again: one copy in reading order pays for itself.
        k, v = k.contiguous(), v.contiguous()
        out = F.scaled_dot_product_attention(
            queries[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1).contiguous()

    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for block in _blocks(keys, query_positions, window, q.dtype):
        rows, block_k, block_v = queries[:, block.rows], k[:, block.keys], v[:, block.keys]
        if softcap is None:
            attended = F.scaled_dot_product_attention(
                rows[None], block_k[None], block_v[None], block.mask, scale=scale, enable_gqa=True
            )[0]
        else:
            weights = _probabilities(rows, block_k, block.seen, scale, softcap).to(q.dtype)
            attended = (weights.flatten(1, 2) @ block_v).reshape(rows.shape)
        out[block.rows] = attended.transpose(0, 1)
    return out


def column_mass_cpu(
    q: Tensor,
    k_pages: Tensor,
    keys: KeySlots,
    query_positions: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    reduce: str,
) -> Tensor:
    """See ``chunkcache_kernels.attend_rows.op.column_mass``."""
    ordered = keys.by_position
    k = ordered.read(k_pages).transpose(0, 1)
    queries = q.transpose(0, 1)
    mass = torch.zeros(len(ordered), dtype=torch.float32)
    for block in _blocks(ordered, query_positions, window, q.dtype):
        weights = _probabilities(
            queries[:, block.rows], k[:, block.keys], block.seen, scale, softcap
        )
        if reduce == "sum":
            mass[block.keys] += weights.sum((0, 1, 2))
        else:
            mass[block.keys] += weights.mean((0, 1)).square_().sum(0)
    if reduce == "l2":
        mass.sqrt_()
    if ordered is keys:
        return mass
    order = torch.argsort(keys.positions, stable=True)
    return torch.empty_like(mass).index_copy_(0, order, mass)


def _is_full_prefill(keys: KeySlots, query_positions: Tensor, window: int | None) -> bool:
    num_rows = query_positions.shape[0]
    if num_rows == 0 or num_rows != len(keys):
        return False
    if window is not None and window <= int(query_positions[-1] - query_positions[0]):
        return False
    return torch.equal(query_positions, keys.positions)


def _blocks(
    keys: KeySlots, query_positions: Tensor, window: int | None, dtype: torch.dtype
) -> tuple[_Block, ...]:
    """The blocks of some rows; made at a request's first layer, remembered for the others."""
    name = f"row blocks, window {window}"
    known = keys.memo.get(name)
    if (
        isinstance(known, _RowBlocks)
        and known.query_positions is query_positions
        and known.dtype == dtype
    ):
        return known.blocks
    blocks = tuple(_cut(keys, query_positions, window, dtype))
    keys.memo[name] = _RowBlocks(query_positions, dtype, blocks)
    return blocks


def _cut(
    keys: KeySlots, query_positions: Tensor, window: int | None, dtype: torch.dtype
) -> Iterator[_Block]:
    """Cut rows into blocks, with key ranges; blocks that see no key are left out."""
    positions = keys.positions
    num_rows = query_positions.shape[0]
    for first in range(0, num_rows, BLOCK_ROWS):
        rows = slice(first, min(first + BLOCK_ROWS, num_rows))
        row_positions = query_positions[rows]
        high = int(torch.searchsorted(positions, row_positions[-1:], right=True))
        low = 0
        if window is not None:
            low = int(torch.searchsorted(positions, row_positions[:1] - window, right=True))
        if low >= high:
            continue
        seen = visible(row_positions, positions[low:high], window)
        if bool(seen.all()):
            yield _Block(rows, slice(low, high), None, None)
            continue
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
        yield _Block(rows, slice(low, high), seen, mask)


def _probabilities(
    rows: Tensor, k: Tensor, seen: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Return fp32 ``[Hkv, g, R, T]`` for rows ``[Hq, R, D]`` and keys ``[Hkv, T, D]``."""
    num_kv_heads = k.shape[0]
    grouped = rows.reshape(num_kv_heads, -1, rows.shape[-1])
    scores = torch.bmm(grouped, k.transpose(1, 2)).float().mul_(scale)
    scores = soft_capped(scores, softcap).unflatten(1, (-1, rows.shape[1]))
    return torch.softmax(scores, dim=-1) if seen is None else masked_softmax(scores, seen)
