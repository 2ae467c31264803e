"""The CPU path of ``attend_decode``: one sequence at a time, in splits fixed by logical position.

Split boundaries are multiples of ``SPLIT_TOKENS`` counted from the start of the sequence, whatever
the pages look like. Every product therefore has a shape that depends on the sequence alone, which
is what makes a row's bits independent of its company and of where its pages lie. A split whose
slots are consecutive is read as a view; only one that is not is gathered.
"""

from itertools import pairwise

import torch
from torch import Tensor

from chunkcache_kernels.masks import soft_capped
from chunkcache_kernels.paged import DecodeBatch, flat_slots

SPLIT_TOKENS = 1024


def attend_decode_cpu(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: DecodeBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """See ``chunkcache_kernels.attend_decode.op.attend_decode``."""
    k_slots, v_slots = flat_slots(k_pages), flat_slots(v_pages)
    num_kv_heads = k_slots.shape[1]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for b, num_tokens in enumerate(batch.lengths_tokens):
        if num_tokens == 0:
            continue
        first = 0 if window is None else max(0, num_tokens - window)
        splits = _splits(first, num_tokens)
        keys = [_read(k_slots, batch, b, start, end) for start, end in splits]
        values = [_read(v_slots, batch, b, start, end) for start, end in splits]
        queries = q[b].unflatten(0, (num_kv_heads, -1))
        out[b] = _attend(queries, keys, values, scale, softcap).flatten(0, 1)
    return out


def _splits(first: int, end: int) -> list[tuple[int, int]]:
    aligned = range(first - first % SPLIT_TOKENS + SPLIT_TOKENS, end, SPLIT_TOKENS)
    return list(pairwise([first, *aligned, end]))


def _read(slots: Tensor, batch: DecodeBatch, b: int, start: int, end: int) -> Tensor:
    """Return logical tokens ``start..end`` as ``[Hkv, n, D]``, strides the same view or copy."""
    place = batch.locate(b, start, end)
    if isinstance(place, int):
        return slots[place : place + end - start].transpose(0, 1)
    return slots.index_select(0, place).transpose(0, 1)


def _attend(
    queries: Tensor, keys: list[Tensor], values: list[Tensor], scale: float, softcap: float | None
) -> Tensor:
    """Attend from queries ``[Hkv, g, D]`` to all splits ``[Hkv, n, D]`` in order."""
    scores = torch.cat([torch.bmm(queries, k.transpose(1, 2)) for k in keys], dim=-1)
    scores = soft_capped(scores.float().mul_(scale), softcap)
    weights = torch.softmax(scores, dim=-1).to(queries.dtype)
    out = torch.zeros(queries.shape, dtype=torch.float32)
    for part, v in zip(weights.split([v.shape[1] for v in values], dim=-1), values, strict=True):
        out += torch.bmm(part, v)
    return out
