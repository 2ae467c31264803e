"""What ``place`` says about itself."""

import torch
from torch import Tensor

from chunkcache_kernels.place.op import place
from chunkcache_kernels.quantise.reference import quantise_reference
from chunkcache_kernels.quantised import GROUP_TOKENS, LARGEST
from chunkcache_kernels.sample import normal, page_slots, random_source, rotation_tables
from chunkcache_kernels.spec import Floor, Inputs, OperatorSpec, Tolerance, num_bytes


def make_inputs(
    seed: int,
    *,
    num_layers: int = 3,
    num_tokens: int = 37,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    rotary_dims: int = 16,
    page_tokens: int = 16,
    rope_table: tuple[int, ...] | None = None,
    source_dtype: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.float32,
    scattered: bool = True,
    interleaved: bool = False,
    group_tokens: int = GROUP_TOKENS,
) -> Inputs:
    """Make arguments of ``place``; all layers use rotation 0 unless ``rope_table`` says more.

    A quantised ``source_dtype`` comes with scales of groups of ``group_tokens``.
    """
    source = random_source(seed)
    rope_table = (0,) * num_layers if rope_table is None else rope_table
    num_pages = num_tokens // page_tokens + 3
    rows = (num_layers, num_tokens, num_kv_heads, head_dim)
    pages = (num_layers, num_pages, page_tokens, num_kv_heads, head_dim)
    cos, sin = rotation_tables(source, max((*rope_table, 0)) + 1, num_tokens, rotary_dims)
    is_quantised = source_dtype in LARGEST
    k, v = (
        normal(source, *rows, dtype=torch.float32 if is_quantised else source_dtype)
        for _ in range(2)
    )
    scales = None
    if is_quantised:
        k, v, scales = quantise_reference(k, v, source_dtype, group_tokens)
    return {
        "k": k,
        "v": v,
        "cos": cos,
        "sin": sin,
        "rope_table": rope_table,
        "k_pages": torch.full(pages, float("nan"), dtype=dtype),
        "v_pages": torch.full(pages, float("nan"), dtype=dtype),
        "slots": page_slots(source, num_tokens, num_pages, page_tokens, scattered),
        "scales": scales,
        "interleaved": interleaved,
    }


def run(inputs: Inputs) -> tuple[Tensor, ...]:
    """Place into copies of the pages and return them, so that inputs can be used again."""
    k_pages, v_pages = inputs["k_pages"].clone(), inputs["v_pages"].clone()
    place(**{**inputs, "k_pages": k_pages, "v_pages": v_pages})
    return k_pages, v_pages


def floor(inputs: Inputs) -> Floor:
    """Read each key, value, scale, angle and slot once; write each key and value once."""
    k, k_pages, scales = inputs["k"], inputs["k_pages"], inputs["scales"]
    read = num_bytes(k, inputs["v"], inputs["cos"], inputs["sin"], inputs["slots"])
    read += 0 if scales is None else scales.num_bytes
    return Floor(moved_bytes=read + 2 * k.numel() * k_pages.element_size(), num_flops=0)


PLACE = OperatorSpec(
    name="place",
    axes=("L", "T", "G", "Hkv", "D", "C", "Drot", "P", "S"),
    make_inputs=make_inputs,
    run=run,
    implementations=("reference", "cpu", "triton"),
    tolerances={
        torch.float32: Tolerance(rtol=1e-6, atol=1e-6),
        torch.float16: Tolerance(rtol=2**-10, atol=1e-4),
        torch.bfloat16: Tolerance(rtol=2**-7, atol=1e-3),
    },
    floor=floor,
)
