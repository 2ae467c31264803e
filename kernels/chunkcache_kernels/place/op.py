"""Owns the public ``place`` operator: its contract, its checks and the choice of implementation."""

import torch
from torch import Tensor

from chunkcache_kernels.checks import require, require_dims, require_shape
from chunkcache_kernels.implementation import chosen
from chunkcache_kernels.place.cpu import place_cpu
from chunkcache_kernels.place.reference import place_reference
from chunkcache_kernels.quantised import Scales, require_scales


def place(
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    rope_table: tuple[int, ...],
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    scales: Scales | None = None,
    interleaved: bool = False,
) -> None:
    """Rotate kept keys to their new positions and write keys and values into page slots.

    Changes ``k_pages`` and ``v_pages`` in place, in the given slots only. Keys are dequantised and
    rotated in fp32 whatever their type and rounded once, to the type of the pages.

    Floor: reads every stored element, scale and angle once, writes every page element once.

    Args:
        k: Keys before RoPE ``[L, T, Hkv, D]`` (layers, tokens, KV heads, head dim), any float type,
            or int8 or e4m3 with ``scales``.
        v: Values, like ``k``.
        cos: Cosines at the new positions, fp32 ``[C, T, Drot]``; C is the number of distinct
            rotations of the model, Drot the rotated dims of a head.
        sin: Sines, like ``cos``.
        rope_table: For each layer its row of ``cos``, or -1 for a layer without rope.
        k_pages: ``[L, P, S, Hkv, D]``, contiguous (pages, slots per page).
        v_pages: Like ``k_pages``.
        slots: Flat slot of each token, int64 ``[T]``, distinct.
        scales: What quantised keys and values are multiplied by; groups begin at token 0.
        interleaved: Pairs are dims ``(2i, 2i + 1)`` instead of ``(i, i + Drot / 2)``.

    Raises:
        KernelArgumentError: Shapes or types do not fit.
    """
    _check(k, v, cos, sin, rope_table, k_pages, v_pages, slots)
    require_scales(k, v, scales)
    if slots.shape[0] == 0:
        return
    match chosen(k_pages.device):
        case "reference":
            run = place_reference
        case "cpu":
            run = place_cpu
        case "triton":
            from chunkcache_kernels.place.triton_kernel import place_triton

            run = place_triton
    run(k, v, cos, sin, rope_table, k_pages, v_pages, slots, interleaved, scales)


def _check(
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    rope_table: tuple[int, ...],
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
) -> None:
    require_dims("k", k, "L,T,Hkv,D")
    require_dims("cos", cos, "C,T,Drot")
    require_dims("k_pages", k_pages, "L,P,S,Hkv,D")
    num_layers, num_tokens, num_heads, head_dim = k.shape
    require_shape("v", v, tuple(k.shape))
    num_tables, _, rotary_dims = cos.shape
    require_shape("cos", cos, (num_tables, num_tokens, rotary_dims))
    require_shape("sin", sin, tuple(cos.shape))
    require_shape("k_pages", k_pages, (num_layers, *k_pages.shape[1:3], num_heads, head_dim))
    require_shape("v_pages", v_pages, tuple(k_pages.shape))
    require_shape("slots", slots, (num_tokens,))
    require(slots.dtype == torch.int64, f"slots must be int64, got {slots.dtype}")
    require(
        cos.dtype == torch.float32 and sin.dtype == torch.float32,
        f"cos and sin must be float32, got {cos.dtype} and {sin.dtype}",
    )
    require(
        rotary_dims % 2 == 0 and rotary_dims <= head_dim,
        f"rotary dims must be even and at most {head_dim}, got {rotary_dims}",
    )
    require(
        len(rope_table) == num_layers and all(-1 <= row < num_tables for row in rope_table),
        f"rope_table {rope_table} must name one of {num_tables} rotations or -1 for each of "
        f"{num_layers} layers",
    )
    require(
        k_pages.is_contiguous() and v_pages.is_contiguous(),
        "k_pages and v_pages must be contiguous",
    )
    require(
        k_pages.dtype == v_pages.dtype,
        f"k_pages are {k_pages.dtype} but v_pages are {v_pages.dtype}",
    )
