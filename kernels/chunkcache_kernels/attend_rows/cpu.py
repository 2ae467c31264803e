"""The CPU path of ``attend_rows`` and ``column_mass``.

Keys go in tiles that fit a core's cache, the query heads of one KV head folded into rows so that one
product serves them all. The rows that see a whole tile attend it without a mask, all at once; the few
whose own position, or whose window's lower end, lies within the tile go under a mask; what the tiles
give is joined by log-sum-exp. A tile reaches no further than the last row sees, so keys that no row
sees are never touched, which keeps whatever lies there (0 * NaN is NaN) out of the result. Rows that
are the last keys in a row (a plain prefill, or one behind a prefix) need no mask of ours: one causal
part, and one of what stands before. Keys in one run of slots are views; others are gathered once, into
the same strides, so both give the same bits.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from chunkcache_kernels.masks import masked_softmax, soft_capped, visible
from chunkcache_kernels.paged import KeySlots

TILE_BYTES = 512 << 10
"""Keys and values of one KV head in a tile: half of a core's second-level cache."""
MIN_WHOLE_ROWS = 16
"""Fewer rows that see a whole tile go under a mask with the others: one call less."""
MASKED_ROWS = 64
"""Rows of one masked part (both measured: ``docs/experiments.md``)."""
SCORE_ROWS = 128
"""Largest number of rows whose scores are held at once where they must be held."""
SCORE_ELEMENTS = 4 << 20
"""Largest number of scores held at once where they must be held."""

# The public scaled_dot_product_attention drops the log-sum-exp of the operator that it runs.
_attend_with_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001


@dataclass(frozen=True)
class _Part:
    """Rows that attend some keys: all of them if there is no mask.

    ``mask`` is what is added to scores, 0 or minus infinity, ``[G * R, T]``: once for each of the
    G query heads of a KV head.
    """

    rows: slice
    keys: slice
    mask: Tensor | None


@dataclass(frozen=True)
class _RowParts:
    """The parts of some rows, for as long as the same rows are asked about."""

    query_positions: Tensor
    dtype: torch.dtype
    parts: tuple[_Part, ...]


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
    grouped = queries.unflatten(0, (k.shape[0], -1))
    num_seen = _num_seen_by_a_tail(keys, query_positions, window)
    if softcap is None and num_seen:
        attended = _attend_tail(grouped, k[:, :num_seen], v[:, :num_seen], scale)
        return attended.flatten(0, 1).transpose(0, 1).contiguous()

    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    if softcap is not None:
        for rows, seen_keys in _score_slices(keys, query_positions, window, q.shape[1]):
            seen = visible(query_positions[rows], keys.positions[seen_keys], window)
            weights = _probabilities(queries[:, rows], k[:, seen_keys], seen, scale, softcap)
            attended = weights.to(q.dtype).flatten(1, 2) @ v[:, seen_keys]
            out[rows] = attended.reshape(q.shape[1], -1, q.shape[2]).transpose(0, 1)
        return out
    attended = torch.zeros_like(grouped, memory_format=torch.contiguous_format)
    lse = torch.full(grouped.shape[:3], float("-inf"))
    for part in _parts(keys, query_positions, window, q, grouped.shape[1]):
        rows = part.rows
        own, own_lse = _attend(
            grouped[:, :, rows], k[:, part.keys], v[:, part.keys], part.mask, scale
        )
        _join(attended[:, :, rows], lse[:, :, rows], own, own_lse)
    out.copy_(attended.flatten(0, 1).transpose(0, 1))
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
    for rows, seen_keys in _score_slices(ordered, query_positions, window, q.shape[1]):
        seen = visible(query_positions[rows], ordered.positions[seen_keys], window)
        weights = _probabilities(queries[:, rows], k[:, seen_keys], seen, scale, softcap)
        if reduce == "sum":
            mass[seen_keys] += weights.sum((0, 1, 2))
        else:
            mass[seen_keys] += weights.mean((0, 1)).square_().sum(0)
    if reduce == "l2":
        mass.sqrt_()
    if ordered is keys:
        return mass
    order = torch.argsort(keys.positions, stable=True)
    return torch.empty_like(mass).index_copy_(0, order, mass)


def _num_seen_by_a_tail(keys: KeySlots, query_positions: Tensor, window: int | None) -> int:
    """How many keys the rows see in all, if they are the last of them, in a row; else 0.

    So it is in a plain prefill and behind a prefix that is there already.
    """
    num_rows = query_positions.shape[0]
    if num_rows == 0:
        return 0
    last = query_positions[-1:].contiguous()
    num_seen = int(torch.searchsorted(keys.positions, last, right=True))
    if num_seen < num_rows:
        return 0
    if window is not None and window <= int(last - keys.positions[0]):
        return 0
    is_tail = torch.equal(query_positions, keys.positions[num_seen - num_rows : num_seen])
    return num_seen if is_tail else 0


def _parts(
    keys: KeySlots, query_positions: Tensor, window: int | None, q: Tensor, num_groups: int
) -> tuple[_Part, ...]:
    """The parts of some rows; made at a request's first layer, remembered for the others."""
    name = f"row parts, window {window}, {num_groups} heads"
    known = keys.memo.get(name)
    if (
        isinstance(known, _RowParts)
        and known.query_positions is query_positions
        and known.dtype == q.dtype
    ):
        return known.parts
    parts = tuple(_cut(keys, query_positions, window, q, num_groups))
    keys.memo[name] = _RowParts(query_positions, q.dtype, parts)
    return parts


def _cut(
    keys: KeySlots, query_positions: Tensor, window: int | None, q: Tensor, num_groups: int
) -> Iterator[_Part]:
    """Cut keys into tiles, and the rows that see a tile into those that see all of it and others."""
    lows, highs = _key_bounds(keys, query_positions, window)
    if not highs:
        return
    tile = max(MASKED_ROWS, TILE_BYTES // (2 * q.shape[2] * q.element_size()))
    for start in range(lows[0], highs[-1], tile):
        end = min(start + tile, highs[-1])
        seeing = range(bisect_right(highs, start), bisect_left(lows, end))
        whole = range(
            max(bisect_left(highs, end), seeing.start), min(bisect_right(lows, start), seeing.stop)
        )
        if len(whole) < min(MIN_WHOLE_ROWS, len(seeing)):
            whole = seeing[:0]
        else:
            yield _Part(slice(whole.start, whole.stop), slice(start, end), None)
        for partial in (range(seeing.start, whole.start), range(whole.stop, seeing.stop)):
            for first in partial[::MASKED_ROWS]:
                last = min(first + MASKED_ROWS, partial.stop) - 1
                rows = slice(first, last + 1)
                seen_keys = slice(max(start, lows[first]), min(end, highs[last]))
                seen = visible(query_positions[rows], keys.positions[seen_keys], window)
                mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, float("-inf"))
                yield _Part(rows, seen_keys, mask.repeat(num_groups, 1))


def _score_slices(
    keys: KeySlots, query_positions: Tensor, window: int | None, num_heads: int
) -> Iterator[tuple[slice, slice]]:
    """Rows, and the keys that any of them may see, so few that their scores may be held."""
    lows, highs = _key_bounds(keys, query_positions, window)
    num_rows = len(highs)
    step = max(1, min(SCORE_ROWS, SCORE_ELEMENTS // max(1, num_heads * len(keys))))
    for first in range(0, num_rows, step):
        end = min(first + step, num_rows)
        if lows[first] < highs[end - 1]:
            yield slice(first, end), slice(lows[first], highs[end - 1])


def _key_bounds(
    keys: KeySlots, query_positions: Tensor, window: int | None
) -> tuple[list[int], list[int]]:
    """For each row the index of its first visible key, and one past its last."""
    highs = torch.searchsorted(keys.positions, query_positions.contiguous(), right=True).tolist()
    if window is None:
        return [0] * len(highs), highs
    lows = torch.searchsorted(keys.positions, query_positions - window, right=True).tolist()
    return lows, highs


def _attend_tail(grouped: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend from rows ``[Hkv, G, R, D]`` that are the last R of the keys; the result likewise."""
    num_groups, num_rows = grouped.shape[1:3]
    first = k.shape[1] - num_rows
    # Every row reads these again and again: one copy in reading order pays for itself.
    own_k, own_v = (x[:, first:].repeat_interleave(num_groups, 0)[None] for x in (k, v))
    own, own_lse = _attend_with_lse(
        grouped.flatten(0, 1)[None], own_k, own_v, is_causal=True, scale=scale
    )
    own = own[0].unflatten(0, (-1, num_groups))
    if first == 0:
        return own
    own_lse = own_lse[0].unflatten(0, (-1, num_groups))
    own = own.contiguous()
    _join(own, own_lse, *_attend(grouped, k[:, :first], v[:, :first], None, scale))
    return own


def _join(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Make attention over some keys, in place, the attention over them and those of ``more``."""
    share = torch.sigmoid(more_lse - lse).to(out.dtype)
    out.lerp_(more, share[..., None])
    torch.logaddexp(lse, more_lse, out=lse)


def _attend(
    grouped: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of rows ``[Hkv, G, R, D]`` and the log-sum-exp of their scores ``[Hkv, G, R]``."""
    folded = grouped.flatten(1, 2)
    out, lse = _attend_with_lse(folded[None], k[None], v[None], attn_mask=mask, scale=scale)
    return out[0].unflatten(1, grouped.shape[1:3]), lse[0].unflatten(1, grouped.shape[1:3])


def _probabilities(
    rows: Tensor, k: Tensor, seen: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Return fp32 ``[Hkv, g, R, T]`` for rows ``[Hq, R, D]`` and keys ``[Hkv, T, D]``."""
    num_kv_heads = k.shape[0]
    grouped = rows.reshape(num_kv_heads, -1, rows.shape[-1])
    scores = torch.bmm(grouped, k.transpose(1, 2)).float().mul_(scale)
    return masked_softmax(soft_capped(scores, softcap).unflatten(1, (-1, rows.shape[1])), seen)
