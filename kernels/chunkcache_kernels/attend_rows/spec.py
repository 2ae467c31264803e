"""What ``attend_rows`` and ``column_mass`` say about themselves."""

import torch
from torch import Tensor

from chunkcache_kernels.attend_rows.op import attend_rows, column_mass
from chunkcache_kernels.masks import visible
from chunkcache_kernels.paged import KeySlots
from chunkcache_kernels.sample import filled_pages, normal, page_slots, random_source
from chunkcache_kernels.spec import Floor, Inputs, OperatorSpec, Tolerance, num_bytes

AXES = ("R", "Hq", "Hkv", "D", "P", "S", "T")


def make_inputs(
    seed: int,
    *,
    num_rows: int = 21,
    num_tokens: int = 150,
    num_query_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page_tokens: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
    scattered: bool = True,
) -> Inputs:
    """Make arguments of ``attend_rows``: random rows of a sequence, its last row among them."""
    source = random_source(seed)
    num_pages = num_tokens // page_tokens + 3
    slots = page_slots(source, num_tokens, num_pages, page_tokens, scattered)
    shape = (num_pages, page_tokens, num_kv_heads, head_dim)
    others = torch.randperm(num_tokens - 1, generator=source)[: num_rows - 1]
    rows = torch.cat((others, torch.tensor([num_tokens - 1]))).sort().values
    return {
        "q": normal(source, num_rows, num_query_heads, head_dim, dtype=dtype),
        "k_pages": filled_pages(source, slots, shape, dtype),
        "v_pages": filled_pages(source, slots, shape, dtype),
        "keys": KeySlots.of(slots, torch.arange(num_tokens)),
        "query_positions": rows,
        "scale": head_dim**-0.5,
        "window": window,
        "softcap": softcap,
    }


def run_attend(inputs: Inputs) -> tuple[Tensor, ...]:
    """Call ``attend_rows``."""
    return (attend_rows(**inputs),)


def run_mass(inputs: Inputs) -> tuple[Tensor, ...]:
    """Call ``column_mass`` with either way to reduce."""
    shared = {name: value for name, value in inputs.items() if name != "v_pages"}
    return column_mass(**shared, reduce="sum"), column_mass(**shared, reduce="l2")


def _num_seen(inputs: Inputs) -> tuple[int, int]:
    """Number of (row, key) pairs that see each other, and of keys that any row sees."""
    seen = visible(inputs["query_positions"], inputs["keys"].positions, inputs["window"])
    return int(seen.sum()), int(seen.any(0).sum())


def floor_attend(inputs: Inputs) -> Floor:
    """Read queries and seen keys and values once, write the result; two products per pair."""
    q, k_pages = inputs["q"], inputs["k_pages"]
    num_pairs, num_keys = _num_seen(inputs)
    kv_bytes = 2 * num_keys * k_pages[0, 0].numel() * k_pages.element_size()
    return Floor(2 * num_bytes(q) + kv_bytes, 4 * num_pairs * q[0].numel())


def floor_mass(inputs: Inputs) -> Floor:
    """Read queries and seen keys once, write a number per key; one product per pair."""
    q, k_pages = inputs["q"], inputs["k_pages"]
    num_pairs, num_keys = _num_seen(inputs)
    k_bytes = num_keys * k_pages[0, 0].numel() * k_pages.element_size()
    return Floor(num_bytes(q) + k_bytes + 4 * len(inputs["keys"]), 2 * num_pairs * q[0].numel())


ATTEND_ROWS = OperatorSpec(
    name="attend_rows",
    axes=AXES,
    make_inputs=make_inputs,
    run=run_attend,
    implementations=("reference", "cpu"),
    tolerances={
        torch.float32: Tolerance(rtol=1e-4, atol=1e-5),
        torch.bfloat16: Tolerance(rtol=2e-2, atol=2e-2),
    },
    floor=floor_attend,
)

COLUMN_MASS = OperatorSpec(
    name="column_mass",
    axes=AXES,
    make_inputs=make_inputs,
    run=run_mass,
    implementations=("reference", "cpu"),
    tolerances={
        torch.float32: Tolerance(rtol=1e-4, atol=1e-5),
        torch.bfloat16: Tolerance(rtol=2e-2, atol=2e-2),
    },
    floor=floor_mass,
)
