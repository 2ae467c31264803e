"""The Triton path of ``place``: one pass reads, dequantises, rotates and scatters keys and values."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from chunkcache_kernels.quantised import Scales
from chunkcache_kernels.triton_runtime import launcher, require_runnable

BLOCK_ROWS = 32


@triton.jit(do_not_specialize=["num_tokens", "num_groups"])
def place_kernel(
    k_ptr,  # [L, T, Hkv, D], last axis contiguous
    v_ptr,  # [L, T, Hkv, D], last axis contiguous
    cos_ptr,  # fp32 [C, T, ROTARY_DIMS], contiguous
    sin_ptr,  # fp32 [C, T, ROTARY_DIMS], contiguous
    rope_table_ptr,  # int32 [L]
    k_pages_ptr,  # [L, P * S, Hkv, D], contiguous
    v_pages_ptr,  # [L, P * S, Hkv, D], contiguous
    slots_ptr,  # int64 [T]
    k_scale_ptr,  # fp32 [L, G, Hkv, D], contiguous; read where GROUP_TOKENS > 0
    v_scale_ptr,  # fp32 [L, T, Hkv], contiguous; likewise
    num_tokens,
    num_groups,
    k_stride_l,
    k_stride_t,
    k_stride_h,
    v_stride_l,
    v_stride_t,
    v_stride_h,
    pages_stride_l,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIMS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,  # 0 for entries that are not quantised
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One program places ``BLOCK_ROWS`` (token, head) rows of one layer."""
    layer = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = (rows // NUM_HEADS).to(tl.int64)
    head = rows % NUM_HEADS
    live = token < num_tokens
    slot = tl.load(slots_ptr + token, mask=live, other=0)
    out_row = layer * pages_stride_l + (slot * NUM_HEADS + head) * HEAD_DIM
    k_row = layer * k_stride_l + token * k_stride_t + head * k_stride_h
    v_row = layer * v_stride_l + token * v_stride_t + head * v_stride_h

    dims = tl.arange(0, BLOCK_DIM)
    v_live = live[:, None] & (dims < HEAD_DIM)[None, :]
    v = tl.load(v_ptr + v_row[:, None] + dims[None, :], mask=v_live).to(tl.float32)
    if GROUP_TOKENS > 0:
        v_scale_row = (layer * num_tokens + token) * NUM_HEADS + head
        v *= tl.load(v_scale_ptr + v_scale_row, mask=live, other=0.0)[:, None]
        group = layer * num_groups + token // GROUP_TOKENS
        k_scale_row = ((group * NUM_HEADS + head) * HEAD_DIM)[:, None]
    else:
        k_scale_row = k_row[:, None]  # never read: there are no scales
    v_out = v_pages_ptr + out_row[:, None] + dims[None, :]
    tl.store(v_out, v.to(v_pages_ptr.dtype.element_ty), mask=v_live)

    HALF: tl.constexpr = ROTARY_DIMS // 2
    if HALF > 0:
        pair = tl.arange(0, BLOCK_HALF)
        if INTERLEAVED:
            first, second, second_angle = 2 * pair, 2 * pair + 1, pair
        else:
            first, second, second_angle = pair, pair + HALF, pair + HALF
        pair_live = live[:, None] & (pair < HALF)[None, :]
        x = tl.load(k_ptr + k_row[:, None] + first[None, :], mask=pair_live).to(tl.float32)
        y = tl.load(k_ptr + k_row[:, None] + second[None, :], mask=pair_live).to(tl.float32)
        if GROUP_TOKENS > 0:
            x *= tl.load(k_scale_ptr + k_scale_row + first[None, :], mask=pair_live)
            y *= tl.load(k_scale_ptr + k_scale_row + second[None, :], mask=pair_live)
        table = tl.load(rope_table_ptr + layer)
        if table >= 0:
            angle_row = ((table * num_tokens + token) * ROTARY_DIMS)[:, None]
            x_cos = tl.load(cos_ptr + angle_row + pair[None, :], mask=pair_live)
            x_sin = tl.load(sin_ptr + angle_row + pair[None, :], mask=pair_live)
            y_cos = tl.load(cos_ptr + angle_row + second_angle[None, :], mask=pair_live)
            y_sin = tl.load(sin_ptr + angle_row + second_angle[None, :], mask=pair_live)
            turned = x * x_cos - y * x_sin
            y = y * y_cos + x * y_sin
            x = turned
        k_out = k_pages_ptr + out_row[:, None]
        tl.store(k_out + first[None, :], x.to(k_pages_ptr.dtype.element_ty), mask=pair_live)
        tl.store(k_out + second[None, :], y.to(k_pages_ptr.dtype.element_ty), mask=pair_live)

    if ROTARY_DIMS < HEAD_DIM:
        rest = ROTARY_DIMS + tl.arange(0, BLOCK_REST)
        rest_live = live[:, None] & (rest < HEAD_DIM)[None, :]
        kept = tl.load(k_ptr + k_row[:, None] + rest[None, :], mask=rest_live).to(tl.float32)
        if GROUP_TOKENS > 0:
            kept *= tl.load(k_scale_ptr + k_scale_row + rest[None, :], mask=rest_live)
        rest_out = k_pages_ptr + out_row[:, None] + rest[None, :]
        tl.store(rest_out, kept.to(k_pages_ptr.dtype.element_ty), mask=rest_live)


def place_triton(
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
    require_runnable(k_pages.device)
    k = k if k.stride(-1) == 1 else k.contiguous()
    v = v if v.stride(-1) == 1 else v.contiguous()
    num_layers, num_tokens, num_heads, head_dim = k.shape
    rotary_dims = cos.shape[-1]
    # Without scales the kernel reads none; any fp32 pointer will do.
    k_scale, v_scale = (cos, sin) if scales is None else (scales.k, scales.v)
    grid = (triton.cdiv(num_tokens * num_heads, BLOCK_ROWS), num_layers)
    launcher(place_kernel, grid)(
        k,
        v,
        cos.contiguous(),
        sin.contiguous(),
        torch.tensor(rope_table, dtype=torch.int32, device=k.device),
        k_pages,
        v_pages,
        slots,
        k_scale.contiguous(),
        v_scale.contiguous(),
        num_tokens,
        k_scale.shape[1],
        *k.stride()[:3],
        *v.stride()[:3],
        k_pages.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIMS=rotary_dims,
        INTERLEAVED=interleaved,
        GROUP_TOKENS=0 if scales is None else scales.group_tokens,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_HALF=triton.next_power_of_2(max(rotary_dims // 2, 1)),
        BLOCK_REST=triton.next_power_of_2(max(head_dim - rotary_dims, 1)),
        BLOCK_DIM=triton.next_power_of_2(head_dim),
    )
