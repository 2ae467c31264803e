"""Owns the public ``quantise`` operator: its contract, its checks, the choice of implementation."""

import torch
from torch import Tensor

from chunkcache_kernels.checks import require, require_dims, require_shape
from chunkcache_kernels.implementation import chosen
from chunkcache_kernels.quantise.reference import quantise_reference
from chunkcache_kernels.quantised import GROUP_TOKENS, LARGEST, Scales


def quantise(
    k: Tensor, v: Tensor, dtype: torch.dtype, *, group_tokens: int = GROUP_TOKENS
) -> tuple[Tensor, Tensor, Scales]:
    """Round keys to ``dtype`` with a scale per channel and token group, values per head and token.

    A scale is the largest magnitude of its group over the largest of the type; elements are
    rounded to nearest, ties to even. int8 is then within half a scale of the number it stands for;
    e4m3 within 1/16 of it (or, close to zero, within 2**-10 scales). A group of zeros has scale 0.
    A group that holds NaN or an infinity has a scale that is not finite, so that looking at the
    scales tells whether the source was. Changes none of its arguments.

    Floor: reads every element once (its group's tile stays in registers) and writes it once.

    Args:
        k: Keys before RoPE ``[L, T, Hkv, D]`` (layers, tokens, KV heads, head dim), any float type.
        v: Values, like ``k``.
        dtype: ``torch.int8`` or ``torch.float8_e4m3fn``.
        group_tokens: Tokens whose keys share scales.

    Returns:
        Keys and values ``[L, T, Hkv, D]`` of ``dtype``, contiguous, and their scales.

    Raises:
        KernelArgumentError: Shapes or types do not fit.
    """
    require_dims("k", k, "L,T,Hkv,D")
    require_shape("v", v, tuple(k.shape))
    require(dtype in LARGEST, f"dtype must be one of {[*LARGEST]}, got {dtype}")
    require(group_tokens > 0, f"group_tokens must be positive, got {group_tokens}")
    require(
        k.is_floating_point() and k.dtype == v.dtype and k.dtype not in LARGEST,
        f"k and v must be of one float type that is not quantised, got {k.dtype} and {v.dtype}",
    )
    if chosen(k.device) == "triton" and k.numel():
        from chunkcache_kernels.quantise.triton_kernel import quantise_triton

        return quantise_triton(k, v, dtype, group_tokens)
    return quantise_reference(k, v, dtype, group_tokens)
