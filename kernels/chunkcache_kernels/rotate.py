"""Owns the rotary embedding of given cosines and sines; knows no model and no frequencies."""

import torch
from torch import Tensor

from chunkcache_kernels.checks import require, require_dims, require_shape


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first ``Drot`` dims of each head, the same math as ``apply_rotary_pos_emb``.

    Computed in fp32 with one rounding back to the type of ``x``. Does not change its arguments.

    Args:
        x: Keys or queries before RoPE ``[T, H, D]`` (tokens, heads, head dim), any float type.
        cos: fp32 ``[T, Drot]``, the two halves equal, as the model's rotary module gives it.
        sin: Like ``cos``.
        interleaved: Pairs are dims ``(2i, 2i + 1)`` instead of ``(i, i + Drot / 2)``; both use
            angle ``i``.

    Returns:
        ``[T, H, D]`` of the type of ``x``; dims from ``Drot`` on are unchanged.

    Raises:
        KernelArgumentError: Shapes do not fit.
    """
    require_dims("x", x, "T,H,D")
    require_dims("cos", cos, "T,Drot")
    num_tokens, rotary_dims = cos.shape
    require(x.shape[0] == num_tokens, f"x has {x.shape[0]} tokens, cos has {num_tokens}")
    require_shape("sin", sin, (num_tokens, rotary_dims))
    require(
        rotary_dims % 2 == 0 and rotary_dims <= x.shape[2],
        f"rotary dims must be even and at most {x.shape[2]}, got {rotary_dims}",
    )
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    rotate_into(out, x.float(), cos[:, None], sin[:, None], interleaved)
    return out.to(x.dtype)


def rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Rotate fp32 ``x`` ``[..., n, H, D]`` into fp32 ``out`` without temporaries.

    Args:
        out: Like ``x``; the two do not overlap.
        x: What to rotate.
        cos: fp32 ``[n, 1, Drot]`` or, which is twice as fast, repeated for each head
            ``[n, H, Drot]``: torch then runs over rows of all heads at once.
        sin: Like ``cos``.
        interleaved: As for :func:`rotate`.
    """
    rotary_dims = cos.shape[-1]
    half = rotary_dims // 2
    first, second = pair_views(x, rotary_dims, interleaved)
    out_first, out_second = pair_views(out, rotary_dims, interleaved)
    if interleaved:
        torch.mul(first, cos[..., :half], out=out_first)
        torch.mul(second, cos[..., :half], out=out_second)
        sin_first = sin_second = sin[..., :half]
    else:
        torch.mul(x[..., :rotary_dims], cos, out=out[..., :rotary_dims])
        sin_first, sin_second = sin[..., :half], sin[..., half:]
    if rotary_dims < x.shape[-1]:
        out[..., rotary_dims:].copy_(x[..., rotary_dims:])
    out_first.addcmul_(second, sin_first, value=-1)
    out_second.addcmul_(first, sin_second)


def pair_views(x: Tensor, rotary_dims: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """View the two members of every rotated pair of ``x`` ``[..., D]``: ``[..., Drot / 2]`` each."""
    if interleaved:
        return x[..., 0:rotary_dims:2], x[..., 1:rotary_dims:2]
    half = rotary_dims // 2
    return x[..., :half], x[..., half:rotary_dims]
