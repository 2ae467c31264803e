"""What ``attend_decode`` says about itself."""

import torch
from torch import Tensor

from chunkcache_kernels.attend_decode.op import attend_decode
from chunkcache_kernels.paged import DecodeBatch
from chunkcache_kernels.sample import filled_pages, normal, random_source
from chunkcache_kernels.spec import Floor, Inputs, OperatorSpec, Tolerance, num_bytes


def make_inputs(
    seed: int,
    *,
    lengths: tuple[int, ...] = (33, 0, 1, 150),
    num_query_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page_tokens: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
    scattered: bool = True,
) -> Inputs:
    """Make arguments of ``attend_decode``; a length of 0 is padding, unused table entries are -1."""
    source = random_source(seed)
    num_blocks = [-(-n // page_tokens) for n in lengths]
    num_pages = sum(num_blocks) + 2
    order = torch.randperm(num_pages, generator=source) if scattered else torch.arange(num_pages)
    tables = torch.full((len(lengths), max(num_blocks)), -1, dtype=torch.int32)
    slots: list[Tensor] = []
    for b, pages in enumerate(order[: sum(num_blocks)].split(num_blocks)):
        tables[b, : len(pages)] = pages
        own = (pages[:, None] * page_tokens + torch.arange(page_tokens)).flatten()
        slots.append(own[: lengths[b]])
    used = torch.cat(slots)
    shape = (num_pages, page_tokens, num_kv_heads, head_dim)
    return {
        "q": normal(source, len(lengths), num_query_heads, head_dim, dtype=dtype),
        "k_pages": filled_pages(source, used, shape, dtype),
        "v_pages": filled_pages(source, used, shape, dtype),
        "batch": DecodeBatch(tables, torch.tensor(lengths), page_tokens),
        "scale": head_dim**-0.5,
        "window": window,
        "softcap": softcap,
    }


def run(inputs: Inputs) -> tuple[Tensor, ...]:
    """Call ``attend_decode``."""
    return (attend_decode(**inputs),)


def floor(inputs: Inputs) -> Floor:
    """Read queries and every key and value in the window once, write the result."""
    q, k_pages, window = inputs["q"], inputs["k_pages"], inputs["window"]
    lengths = inputs["batch"].lengths_tokens
    num_keys = sum(n if window is None else min(n, window) for n in lengths)
    kv_bytes = 2 * num_keys * k_pages[0, 0].numel() * k_pages.element_size()
    return Floor(2 * num_bytes(q) + kv_bytes, 4 * num_keys * q[0].numel())


ATTEND_DECODE = OperatorSpec(
    name="attend_decode",
    axes=("B", "Hq", "Hkv", "D", "P", "S", "N"),
    make_inputs=make_inputs,
    run=run,
    implementations=("reference", "cpu", "triton"),
    tolerances={
        torch.float32: Tolerance(rtol=1e-4, atol=1e-5),
        torch.bfloat16: Tolerance(rtol=2e-2, atol=2e-2),
    },
    floor=floor,
)
