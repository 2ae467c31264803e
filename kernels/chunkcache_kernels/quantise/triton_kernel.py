"""The Triton path of ``quantise``: a group's tile is read once, reduced and rounded in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from chunkcache_kernels.quantised import LARGEST, Scales, count_groups
from chunkcache_kernels.triton_runtime import launcher, require_runnable

BLOCK_CHANNELS = 64
BLOCK_ROWS = 32

ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2**23: added to and taken from a number below 2**22, it leaves the nearest integer, ties to
even, as the reference rounds."""


@triton.jit
def quantised(x, scale, LARGEST: tl.constexpr, IS_INT: tl.constexpr):
    """``x / scale`` on the type's grid; 0 where the scale is 0, infinite or not a number.

    Rounded here and not by the cast, so that every back end of Triton gives the same bits.
    """
    usable = (scale > 0) & (scale < float("inf"))
    scaled = tl.where(usable, tl.div_rn(x, tl.where(usable, scale, 1.0)), 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    if IS_INT:
        return (scaled + ROUNDER) - ROUNDER
    # e4m3 has steps of an eighth of the power of two below a number, and of 2**-9 below 2**-6.
    power = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.maximum(power, 0.015625) * 0.125
    return ((tl.div_rn(scaled, step) + ROUNDER) - ROUNDER) * step


@triton.jit
def scale_of(peak, holes, LARGEST: tl.constexpr):
    """The scale of groups whose largest magnitudes are ``peak``.

    ``holes`` is 0, and NaN for a group that holds NaN, which a maximum alone would lose.
    """
    whole = tl.maximum(peak, holes, propagate_nan=tl.PropagateNan.ALL)
    return tl.div_rn(whole, tl.zeros_like(whole) + LARGEST)


@triton.jit(do_not_specialize=["num_tokens", "num_groups"])
def quantise_keys_kernel(
    k_ptr,  # [L, T, Hkv, D], any strides but the last
    out_ptr,  # int8 or fp8 [L, T, Hkv * D], contiguous
    scale_ptr,  # fp32 [L, G, Hkv * D], contiguous
    num_tokens,
    num_groups,
    k_stride_l,
    k_stride_t,
    k_stride_h,
    NUM_CHANNELS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """One program quantises ``BLOCK_CHANNELS`` channels of one token group of one layer."""
    group = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    member = tl.arange(0, BLOCK_TOKENS)
    token = group * GROUP_TOKENS + member
    live = ((member < GROUP_TOKENS) & (token < num_tokens))[:, None]
    live = live & (channel < NUM_CHANNELS)[None, :]
    source = (channel // HEAD_DIM) * k_stride_h + channel % HEAD_DIM
    rows = layer * k_stride_l + token * k_stride_t
    x = tl.load(k_ptr + rows[:, None] + source[None, :], mask=live, other=0.0).to(tl.float32)
    holes = tl.sum(tl.where(x == x, 0.0, float("nan")), axis=0)
    scale = scale_of(tl.max(tl.abs(x), axis=0), holes, LARGEST)
    out = quantised(x, scale[None, :], LARGEST, IS_INT).to(out_ptr.dtype.element_ty)
    out_rows = (layer * num_tokens + token) * NUM_CHANNELS
    tl.store(out_ptr + out_rows[:, None] + channel[None, :], out, mask=live)
    out_scales = scale_ptr + (layer * num_groups + group) * NUM_CHANNELS
    tl.store(out_scales + channel, scale, mask=channel < NUM_CHANNELS)


@triton.jit(do_not_specialize=["num_tokens"])
def quantise_values_kernel(
    v_ptr,  # [L, T, Hkv, D], any strides but the last
    out_ptr,  # int8 or fp8 [L, T, Hkv, D], contiguous
    scale_ptr,  # fp32 [L, T, Hkv], contiguous
    num_tokens,
    v_stride_l,
    v_stride_t,
    v_stride_h,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One program quantises ``BLOCK_ROWS`` (token, head) rows of one layer."""
    layer = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = (rows // NUM_HEADS).to(tl.int64)
    dims = tl.arange(0, BLOCK_DIM)
    live = (token < num_tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    source = layer * v_stride_l + token * v_stride_t + (rows % NUM_HEADS) * v_stride_h
    x = tl.load(v_ptr + source[:, None] + dims[None, :], mask=live, other=0.0).to(tl.float32)
    holes = tl.sum(tl.where(x == x, 0.0, float("nan")), axis=1)
    scale = scale_of(tl.max(tl.abs(x), axis=1), holes, LARGEST)
    out = quantised(x, scale[:, None], LARGEST, IS_INT).to(out_ptr.dtype.element_ty)
    out_rows = layer * num_tokens * NUM_HEADS + rows
    tl.store(out_ptr + (out_rows * HEAD_DIM)[:, None] + dims[None, :], out, mask=live)
    tl.store(scale_ptr + out_rows, scale, mask=token < num_tokens)


def quantise_triton(
    k: Tensor, v: Tensor, dtype: torch.dtype, group_tokens: int
) -> tuple[Tensor, Tensor, Scales]:
    """See ``chunkcache_kernels.quantise.op.quantise``."""
    require_runnable(k.device)
    k = k if k.stride(-1) == 1 else k.contiguous()
    v = v if v.stride(-1) == 1 else v.contiguous()
    num_layers, num_tokens, num_heads, head_dim = k.shape
    num_channels = num_heads * head_dim
    num_groups = count_groups(num_tokens, group_tokens)
    k_out, v_out = (torch.empty(k.shape, dtype=dtype, device=k.device) for _ in range(2))
    k_scale = torch.empty(num_layers, num_groups, num_heads, head_dim, device=k.device)
    v_scale = torch.empty(num_layers, num_tokens, num_heads, device=k.device)
    grid = (triton.cdiv(num_channels, BLOCK_CHANNELS), num_groups, num_layers)
    launcher(quantise_keys_kernel, grid)(
        k,
        k_out,
        k_scale,
        num_tokens,
        num_groups,
        *k.stride()[:3],
        NUM_CHANNELS=num_channels,
        HEAD_DIM=head_dim,
        GROUP_TOKENS=group_tokens,
        LARGEST=LARGEST[dtype],
        IS_INT=dtype == torch.int8,
        BLOCK_TOKENS=triton.next_power_of_2(group_tokens),
        BLOCK_CHANNELS=BLOCK_CHANNELS,
    )
    grid = (triton.cdiv(num_tokens * num_heads, BLOCK_ROWS), num_layers)
    launcher(quantise_values_kernel, grid)(
        v,
        v_out,
        v_scale,
        num_tokens,
        *v.stride()[:3],
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        LARGEST=LARGEST[dtype],
        IS_INT=dtype == torch.int8,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
    )
    return k_out, v_out, Scales(k_scale, v_scale, group_tokens)
