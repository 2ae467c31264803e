"""What ``quantise`` says about itself.

Its outputs are compared as numbers, dequantised: where two implementations divide a tie, the stored
elements differ by one and so does the number, by one scale.
"""

import torch
from torch import Tensor

from chunkcache_kernels.quantise.op import quantise
from chunkcache_kernels.quantised import GROUP_TOKENS, dequantise
from chunkcache_kernels.sample import normal, random_source
from chunkcache_kernels.spec import Floor, Inputs, OperatorSpec, Tolerance, num_bytes


def make_inputs(
    seed: int,
    *,
    num_layers: int = 2,
    num_tokens: int = 37,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.int8,
    source_dtype: torch.dtype = torch.float32,
    group_tokens: int = GROUP_TOKENS,
    outliers: bool = False,
) -> Inputs:
    """Make arguments of ``quantise``; with ``outliers`` one key channel is 100 times the others."""
    source = random_source(seed)
    rows = (num_layers, num_tokens, num_kv_heads, head_dim)
    k = normal(source, *rows, dtype=torch.float32)
    if outliers:
        k[..., head_dim // 2] *= 100
    return {
        "k": k.to(source_dtype),
        "v": normal(source, *rows, dtype=source_dtype),
        "dtype": dtype,
        "group_tokens": group_tokens,
    }


def run(inputs: Inputs) -> tuple[Tensor, ...]:
    """Quantise and return the scales, and what the elements stand for."""
    k, v, scales = quantise(**inputs)
    return scales.k, scales.v, *dequantise(k, v, scales)


def floor(inputs: Inputs) -> Floor:
    """Read each element once, write each element and scale once."""
    k, group_tokens = inputs["k"], inputs["group_tokens"]
    num_layers, num_tokens, num_heads, head_dim = k.shape
    num_scales = num_layers * num_heads * (-(-num_tokens // group_tokens) * head_dim + num_tokens)
    read = num_bytes(k, inputs["v"])
    return Floor(moved_bytes=read + 2 * k.numel() + 4 * num_scales, num_flops=0)


QUANTISE = OperatorSpec(
    name="quantise",
    axes=("L", "T", "G", "Hkv", "D"),
    make_inputs=make_inputs,
    run=run,
    implementations=("reference", "triton"),
    tolerances={
        torch.int8: Tolerance(rtol=0, atol=1e-6),
        torch.float8_e4m3fn: Tolerance(rtol=0, atol=1e-6),
    },
    floor=floor,
)
