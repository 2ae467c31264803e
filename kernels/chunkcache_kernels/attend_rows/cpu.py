"""The CPU path of ``attend_rows`` and ``column_mass``.

Keys go in tiles that fit a core's cache, the query heads of one KV head folded into rows so that one
product serves them all. The rows that see a whole tile attend it without a mask, all at once; the few
whose own position, or whose window's lower end, lies within the tile go under a mask; what the tiles
give is joined by log-sum-exp. A tile reaches no further than the last row sees, so keys that no row
sees are never touched, which keeps whatever lies there (0 * NaN is NaN) out of the result. Keys in one
run of slots are views; others are gathered once, into the same strides, so both give the same bits.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
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
"""Rows of one masked part."""
CLOSE_MASKED_ROWS = 128
"""Rows of one masked part if they stand close to each other (all measured: ``docs/experiments.md``)."""
SCORE_ROWS = 128
"""Largest number of rows whose scores are held at once where they must be held."""
SCORE_ELEMENTS = 4 << 20
"""Largest number of scores held at once where they must be held."""
LEAST_ROWS = 4
LEAST_ROWS_OF_ONE_HEAD = 33
"""Fewer rows are attended beside repeats of the last one: the library's operator divides the keys of
fewer rows, and the products of a lone block of 32 rows of a lone head, among threads, so that the
bits depend on how many there are (measured: every number of rows, 1 to 16 threads)."""

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
    """The parts of some rows, for as long as the same rows are asked about.

    ``blind`` are the rows that see no key at all.
    """

    query_positions: Tensor
    dtype: torch.dtype
    parts: tuple[_Part, ...]
    blind: tuple[int, ...]


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
    if softcap is not None:
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for rows, seen_keys in _score_slices(keys, query_positions, window, q.shape[1]):
            seen = visible(query_positions[rows], keys.positions[seen_keys], window)
            weights = _probabilities(queries[:, rows], k[:, seen_keys], seen, scale, softcap)
            attended = _product(weights.to(q.dtype).flatten(1, 2), v[:, seen_keys])
            out[rows] = attended.reshape(q.shape[1], -1, q.shape[2]).transpose(0, 1)
        return out
    # In fp32 whatever the dtype: each join would round once more.
    attended = torch.empty(grouped.shape, dtype=torch.float32)
    lse = torch.empty(grouped.shape[:3])
    num_begun = 0
    row_parts = _row_parts(keys, query_positions, window, q, grouped.shape[1])
    for part in row_parts.parts:
        rows = part.rows
        own, own_lse = _attend(
            grouped[:, :, rows], k[:, part.keys], v[:, part.keys], part.mask, scale
        )
        # Parts go up in rows within a tile, so the rows that have seen keys before come first.
        num_joined = max(0, min(rows.stop, num_begun) - rows.start)
        if num_joined:
            joined = slice(rows.start, rows.start + num_joined)
            _join(
                attended[:, :, joined],
                lse[:, :, joined],
                own[:, :, :num_joined],
                own_lse[:, :, :num_joined],
            )
        begun = slice(rows.start + num_joined, rows.stop)
        attended[:, :, begun] = own[:, :, num_joined:]
        lse[:, :, begun] = own_lse[:, :, num_joined:]
        num_begun = max(num_begun, rows.stop)
    if row_parts.blind:
        attended[:, :, row_parts.blind] = 0
    return attended.flatten(0, 1).transpose(0, 1).contiguous().to(q.dtype)


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


def _row_parts(
    keys: KeySlots, query_positions: Tensor, window: int | None, q: Tensor, num_groups: int
) -> _RowParts:
    """The parts of some rows; made at a request's first layer, remembered for the others."""
    name = f"row parts, window {window}, {num_groups} heads"
    known = keys.memo.get(name)
    if (
        isinstance(known, _RowParts)
        and known.query_positions is query_positions
        and known.dtype == q.dtype
    ):
        return known
    lows, highs = _key_bounds(keys, query_positions, window)
    parts = tuple(_cut(lows, highs, q, num_groups))
    blind = tuple(i for i, (low, high) in enumerate(zip(lows, highs, strict=True)) if low >= high)
    found = _RowParts(query_positions, q.dtype, parts, blind)
    keys.memo[name] = found
    return found


def _cut(lows: Sequence[int], highs: Sequence[int], q: Tensor, num_groups: int) -> Iterator[_Part]:
    """Cut keys into tiles, and the rows that see a tile into those that see all of it and others.

    Parts of a tile come in the order of their rows.
    """
    if not highs:
        return
    masks: dict[tuple[tuple[int, int], ...], Tensor] = {}  # rows in a row have few different ones
    tile = max(MASKED_ROWS, TILE_BYTES // (2 * q.shape[2] * q.element_size()))
    for start in range(lows[0], highs[-1], tile):
        end = min(start + tile, highs[-1])
        seeing = range(bisect_right(highs, start), bisect_left(lows, end))
        whole = range(
            max(bisect_left(highs, end), seeing.start), min(bisect_right(lows, start), seeing.stop)
        )
        if len(whole) < min(MIN_WHOLE_ROWS, len(seeing)):
            whole = seeing[:0]
        before, after = range(seeing.start, whole.start), range(whole.stop, seeing.stop)
        for rows in (*_masked_rows(before, highs), whole, *_masked_rows(after, highs)):
            if not rows:
                continue
            keys = slice(max(start, lows[rows.start]), min(end, highs[rows.stop - 1]))
            num_keys = keys.stop - keys.start
            if num_keys <= 0:  # none of these rows sees a key
                continue
            mask = None
            if rows != whole:
                within = tuple(
                    (max(lows[row] - keys.start, 0), min(highs[row] - keys.start, num_keys))
                    for row in rows
                )
                mask = masks.get(within)
                if mask is None:
                    mask = _mask(within, num_keys, q.dtype).repeat(num_groups, 1)
                    masks[within] = mask
            yield _Part(slice(rows.start, rows.stop), keys, mask)


def _masked_rows(rows: range, highs: Sequence[int]) -> Iterator[range]:
    """Cut rows that go under a mask: more rows make larger products, but more masked keys."""
    while rows:
        part = rows[:CLOSE_MASKED_ROWS]
        if highs[part[-1]] - highs[part[0]] > 2 * CLOSE_MASKED_ROWS:
            part = rows[:MASKED_ROWS]
        yield part
        rows = rows[len(part) :]


def _mask(bounds: Sequence[tuple[int, int]], num_keys: int, dtype: torch.dtype) -> Tensor:
    """What is added to scores ``[R, num_keys]`` if row ``i`` sees the keys within ``bounds[i]``."""
    lows, highs = torch.tensor(bounds)[:, :, None].unbind(1)
    key = torch.arange(num_keys)
    seen = (key >= lows) & (key < highs)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))


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


def _join(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Make attention over some keys, in place, the attention over them and those of ``more``."""
    out.lerp_(more.to(out.dtype), torch.sigmoid(more_lse - lse)[..., None])
    torch.logaddexp(lse, more_lse, out=lse)


def _attend(
    grouped: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of rows ``[Hkv, G, R, D]`` and the log-sum-exp of their scores ``[Hkv, G, R]``."""
    folded = grouped.flatten(1, 2)
    num_rows = folded.shape[1]
    num_repeats = (LEAST_ROWS if len(k) > 1 else LEAST_ROWS_OF_ONE_HEAD) - num_rows
    if num_repeats > 0:
        folded = _with_repeats(folded, 1, num_repeats)
        mask = None if mask is None else _with_repeats(mask, 0, num_repeats)
    out, lse = _attend_with_lse(folded[None], k[None], v[None], attn_mask=mask, scale=scale)
    out, lse = out[0, :, :num_rows], lse[0, :, :num_rows]
    return out.unflatten(1, grouped.shape[1:3]), lse.unflatten(1, grouped.shape[1:3])


def _with_repeats(rows: Tensor, dim: int, num_repeats: int) -> Tensor:
    """The rows, and the last of them some times more."""
    last = rows.narrow(dim, rows.shape[dim] - 1, 1)
    return torch.cat([rows, *[last] * num_repeats], dim)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched product whose bits do not depend on the number of threads.

    One product is divided among threads, several are not: a lone one goes as two.
    """
    if len(a) > 1:
        return a @ b
    return (a.expand(2, -1, -1) @ b.expand(2, -1, -1))[:1]


def _probabilities(
    rows: Tensor, k: Tensor, seen: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Return fp32 ``[Hkv, g, R, T]`` for rows ``[Hq, R, D]`` and keys ``[Hkv, T, D]``."""
    num_kv_heads = k.shape[0]
    grouped = rows.reshape(num_kv_heads, -1, rows.shape[-1])
    scores = _product(grouped, k.transpose(1, 2)).float().mul_(scale)
    return masked_softmax(soft_capped(scores, softcap).unflatten(1, (-1, rows.shape[1])), seen)
