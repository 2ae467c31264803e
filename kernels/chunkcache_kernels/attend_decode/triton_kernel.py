"""The Triton path of ``attend_decode``: flash decoding with fixed splits and a fixed-order merge.

Stage one attends from each (sequence, KV head) to each split of ``SPLIT_TOKENS`` logical tokens
and stores an unnormalised partial; stage two merges the partials of one query head from the first
split to the last. Boundaries of splits and tiles are multiples counted from the start of the
sequence, and sizes that change with the batch are not specialised on, so the code that runs for a
row, and its order of sums, depends on that row alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from chunkcache_kernels.paged import DecodeBatch
from chunkcache_kernels.triton_runtime import interpreting, launcher, require_runnable

SPLIT_TOKENS = 512
TILE_TOKENS = 64
MIN_DOT_ROWS = 16
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_splits", "table_stride", "window"])
def decode_split_kernel(
    q_ptr,  # [B, Hq, D], contiguous
    k_pages_ptr,  # [P * S, Hkv, D], contiguous
    v_pages_ptr,  # [P * S, Hkv, D], contiguous
    tables_ptr,  # int32 [B, N]
    lengths_ptr,  # int64 [B]
    partial_ptr,  # fp32 [B, Hq, num_splits, D]: sum of weights times values
    peak_ptr,  # fp32 [B, Hq, num_splits]: largest score, base 2
    total_ptr,  # fp32 [B, Hq, num_splits]: sum of weights
    num_splits,
    table_stride,
    window,  # 0 means none
    scale,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,  # multiply in fp32 whatever the type of the pages
    SPLIT_TOKENS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One program attends from the query heads of one KV head to one split."""
    b = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + b).to(tl.int32)
    first = length * 0
    if window > 0:
        first = tl.maximum(length - window, 0)
    low = tl.maximum(split * SPLIT_TOKENS, first)
    high = tl.minimum((split + 1) * SPLIT_TOKENS, length)
    if low < high:
        member = tl.arange(0, BLOCK_GROUP)
        dims = tl.arange(0, BLOCK_DIM)
        q_row = b * NUM_KV_HEADS * GROUP + kv_head * GROUP + member
        q_live = (member < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + q_row[:, None] * HEAD_DIM + dims[None, :], mask=q_live, other=0.0)
        if WIDEN:
            q = q.to(tl.float32)

        peak = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_GROUP], tl.float32)
        partial = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
        for tile in range(low // TILE_TOKENS * TILE_TOKENS, high, TILE_TOKENS):
            token = tile + tl.arange(0, TILE_TOKENS)
            live = (token >= low) & (token < high)
            page = tl.load(
                tables_ptr + b * table_stride + token // PAGE_TOKENS, mask=live, other=0
            ).to(tl.int64)
            row = (page * PAGE_TOKENS + token % PAGE_TOKENS) * NUM_KV_HEADS + kv_head
            offsets = row[:, None] * HEAD_DIM + dims[None, :]
            tile_live = live[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_pages_ptr + offsets, mask=tile_live, other=0.0)
            v = tl.load(v_pages_ptr + offsets, mask=tile_live, other=0.0)

            if WIDEN:
                k, v = k.to(tl.float32), v.to(tl.float32)

            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if SOFTCAP:
                half = tl.exp2(tl.abs(scores) * (-2.0 * LOG2E / softcap))
                capped = softcap * (1.0 - half) / (1.0 + half)
                scores = tl.where(scores < 0, -capped, capped)
            scores = tl.where(live[None, :], scores * LOG2E, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            kept = tl.exp2(peak - new_peak)
            weights = tl.exp2(scores - new_peak[:, None])
            total = total * kept + tl.sum(weights, 1)
            partial = partial * kept[:, None]
            rounded = weights.to(v_pages_ptr.dtype.element_ty).to(v.dtype)
            partial += tl.dot(rounded, v, input_precision="ieee")
            peak = new_peak

        out = q_row * num_splits + split
        tl.store(peak_ptr + out, peak, mask=member < GROUP)
        tl.store(total_ptr + out, total, mask=member < GROUP)
        tl.store(partial_ptr + out[:, None] * HEAD_DIM + dims[None, :], partial, mask=q_live)


@triton.jit(do_not_specialize=["num_splits", "window"])
def decode_merge_kernel(
    partial_ptr,  # fp32 [B, Hq, num_splits, D]
    peak_ptr,  # fp32 [B, Hq, num_splits]
    total_ptr,  # fp32 [B, Hq, num_splits]
    lengths_ptr,  # int64 [B]
    out_ptr,  # [B, Hq, D], contiguous
    num_splits,
    window,  # 0 means none
    NUM_QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One program merges the splits of one (sequence, query head), in order."""
    b = tl.program_id(0).to(tl.int64)
    row = b * NUM_QUERY_HEADS + tl.program_id(1)
    length = tl.load(lengths_ptr + b).to(tl.int32)
    first = length * 0
    if window > 0:
        first = tl.maximum(length - window, 0)
    dims = tl.arange(0, BLOCK_DIM)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    merged = tl.zeros([BLOCK_DIM], tl.float32)
    for split in range(first // SPLIT_TOKENS, tl.cdiv(length, SPLIT_TOKENS)):
        source = row * num_splits + split
        split_peak = tl.load(peak_ptr + source)
        partial = tl.load(partial_ptr + source * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        new_peak = tl.maximum(peak, split_peak)
        kept = tl.exp2(peak - new_peak)
        added = tl.exp2(split_peak - new_peak)
        merged = merged * kept + partial * added
        total = total * kept + tl.load(total_ptr + source) * added
        peak = new_peak
    merged = merged / tl.where(length > 0, total, 1.0)
    out = out_ptr + row * HEAD_DIM + dims
    tl.store(out, merged.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def attend_decode_triton(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: DecodeBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """See ``chunkcache_kernels.attend_decode.op.attend_decode``."""
    require_runnable(q.device)
    q = q.contiguous()
    num_sequences, num_query_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[2]
    out = torch.empty_like(q)
    num_splits = max(1, triton.cdiv(max(batch.lengths_tokens, default=0), SPLIT_TOKENS))
    statistics = (num_sequences, num_query_heads, num_splits)
    partial = torch.empty(*statistics, head_dim, dtype=torch.float32, device=q.device)
    peak = torch.empty(statistics, dtype=torch.float32, device=q.device)
    total = torch.empty(statistics, dtype=torch.float32, device=q.device)
    tables = batch.block_tables.contiguous()
    block_dim = max(MIN_DOT_ROWS, triton.next_power_of_2(head_dim))
    launcher(decode_split_kernel, (num_sequences, num_kv_heads, num_splits))(
        q,
        k_pages,
        v_pages,
        tables,
        batch.lengths,
        partial,
        peak,
        total,
        num_splits,
        tables.stride(0),
        window or 0,
        scale,
        softcap or 1.0,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_query_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_TOKENS=batch.page_tokens,
        SOFTCAP=softcap is not None,
        WIDEN=interpreting() and q.dtype == torch.bfloat16,
        SPLIT_TOKENS=SPLIT_TOKENS,
        TILE_TOKENS=TILE_TOKENS,
        BLOCK_GROUP=max(MIN_DOT_ROWS, triton.next_power_of_2(num_query_heads // num_kv_heads)),
        BLOCK_DIM=block_dim,
    )
    launcher(decode_merge_kernel, (num_sequences, num_query_heads))(
        partial,
        peak,
        total,
        batch.lengths,
        out,
        num_splits,
        window or 0,
        NUM_QUERY_HEADS=num_query_heads,
        HEAD_DIM=head_dim,
        SPLIT_TOKENS=SPLIT_TOKENS,
        BLOCK_DIM=block_dim,
    )
    return out
