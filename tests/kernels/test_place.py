"""``place``: every implementation against the reference, and what must not depend on layout."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkcache_kernels.checks import KernelArgumentError
from chunkcache_kernels.implementation import Implementation, use_implementation
from chunkcache_kernels.paged import flat_slots
from chunkcache_kernels.place import cpu
from chunkcache_kernels.place.op import place
from chunkcache_kernels.place.spec import PLACE
from chunkcache_kernels.quantised import Scales

SCALES = Scales(torch.zeros(3, 5, 2, 16), torch.zeros(3, 37, 2), 8)
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one token": {"num_tokens": 1},
    "one run": {"scattered": False},
    "partial rotary": {"rotary_dims": 6},
    "odd head dim": {"head_dim": 24, "rotary_dims": 18},
    "interleaved": {"interleaved": True},
    "interleaved partial": {"interleaved": True, "rotary_dims": 10, "scattered": False},
    "layers without rope": {"rope_table": (-1, 0, -1)},
    "no layer with rope": {"rope_table": (-1, -1, -1)},
    "two rotations": {"rope_table": (1, 0, 1), "num_kv_heads": 1},
    "fp32 source": {"source_dtype": torch.float32},
    "fp16 source": {"source_dtype": torch.float16, "scattered": False},
    "bf16 pages": {"dtype": torch.bfloat16},
    "bf16 pages, one run": {"dtype": torch.bfloat16, "scattered": False},
    "fp16 pages": {"dtype": torch.float16, "source_dtype": torch.float32},
    "pages of one slot": {"page_tokens": 1, "num_tokens": 5},
    "pages of five slots": {"page_tokens": 5, "num_kv_heads": 3},
    "int8": {"source_dtype": torch.int8},
    "int8, groups of eight": {"source_dtype": torch.int8, "group_tokens": 8, "scattered": False},
    "int8, last group of one": {"source_dtype": torch.int8, "group_tokens": 12, "num_kv_heads": 3},
    "int8, one token": {"source_dtype": torch.int8, "num_tokens": 1},
    "int8 interleaved partial": {
        "source_dtype": torch.int8,
        "interleaved": True,
        "rotary_dims": 10,
        "group_tokens": 16,
    },
    "int8, some layers without rope": {"source_dtype": torch.int8, "rope_table": (-1, 1, 0)},
    "int8 to bf16": {"source_dtype": torch.int8, "dtype": torch.bfloat16, "scattered": False},
    "fp8": {"source_dtype": torch.float8_e4m3fn},
    "fp8, one run": {"source_dtype": torch.float8_e4m3fn, "group_tokens": 8, "scattered": False},
    "fp8 partial to fp16": {
        "source_dtype": torch.float8_e4m3fn,
        "rotary_dims": 6,
        "dtype": torch.float16,
    },
}


@pytest.mark.parametrize("implementation", PLACE.implementations[1:])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_equals_the_reference(implementation: Implementation, shape: dict[str, Any]):
    inputs = PLACE.make_inputs(3, **shape)
    PLACE.check(implementation, inputs, shape.get("dtype", torch.float32))


@pytest.mark.parametrize("implementation", PLACE.implementations)
@pytest.mark.parametrize("scattered", [True, False])
def test_writes_its_slots_and_no_other(implementation: Implementation, scattered: bool):
    inputs = PLACE.make_inputs(4, scattered=scattered)
    with use_implementation(implementation):
        written = PLACE.run(inputs)
    unused = torch.ones(flat_slots(inputs["k_pages"]).shape[1], dtype=torch.bool)
    unused[inputs["slots"]] = False
    for pages in written:
        assert flat_slots(pages)[:, unused].isnan().all()
        assert flat_slots(pages)[:, ~unused].isfinite().all()


@pytest.mark.parametrize("implementation", PLACE.implementations)
def test_layers_without_rope_and_values_are_copied_exactly(implementation: Implementation):
    inputs = PLACE.make_inputs(5, rope_table=(-1, 0, -1))
    with use_implementation(implementation):
        k_pages, v_pages = PLACE.run(inputs)
    for layer in (0, 2):
        assert torch.equal(flat_slots(k_pages)[layer, inputs["slots"]], inputs["k"][layer].float())
    assert torch.equal(flat_slots(v_pages)[:, inputs["slots"]], inputs["v"].float())


@pytest.mark.parametrize("implementation", PLACE.implementations)
def test_takes_rows_cut_out_of_a_larger_entry(implementation: Implementation):
    inputs = dict(PLACE.make_inputs(6, num_tokens=20))
    wide = {name: inputs[name].repeat(1, 2, 1, 1) for name in ("k", "v")}
    cut = {name: rows[:, 20:] for name, rows in wide.items()}
    assert not cut["k"].is_contiguous()
    with use_implementation(implementation):
        whole, strided = PLACE.run(inputs), PLACE.run({**inputs, **cut})
    for a, b in zip(whole, strided, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=25, deadline=None)
@given(
    num_tokens=st.integers(1, 70),
    head_dim=st.sampled_from([8, 24, 64]),
    rotary_share=st.sampled_from([1, 2]),
    interleaved=st.booleans(),
    block_bits=st.integers(5, 18),
    source=st.sampled_from([torch.bfloat16, torch.int8, torch.float8_e4m3fn]),
    cut=st.integers(0, 70),
    seed=st.integers(0, 99),
)
def test_the_cpu_path_gives_the_same_bits_in_any_layout(
    num_tokens: int,
    head_dim: int,
    rotary_share: int,
    interleaved: bool,
    block_bits: int,
    source: torch.dtype,
    cut: int,
    seed: int,
):
    """In one run, in scattered pages, in single slots, in two calls, in blocks of any size.

    Quantised entries are not cut: their scales are of whole groups.
    """
    inputs = PLACE.make_inputs(
        seed,
        num_tokens=num_tokens,
        head_dim=head_dim,
        rotary_dims=head_dim // rotary_share,
        interleaved=interleaved,
        scattered=False,
        source_dtype=source,
        group_tokens=16,
    )
    num_slots = flat_slots(inputs["k_pages"]).shape[1]
    paged = PLACE.make_inputs(seed, num_tokens=num_tokens)["slots"]
    single = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))[:num_tokens]

    def placed(slots: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        pages = inputs["k_pages"].clone(), inputs["v_pages"].clone()
        for start, end in pairwise(bounds):
            part = {name: inputs[name][:, start:end] for name in ("k", "v", "cos", "sin")}
            place(
                **part,
                rope_table=inputs["rope_table"],
                k_pages=pages[0],
                v_pages=pages[1],
                slots=slots[start:end],
                scales=inputs["scales"],
                interleaved=interleaved,
            )
        return flat_slots(torch.stack(pages))[:, :, slots]

    whole = [0, num_tokens]
    expected = placed(inputs["slots"], whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "BLOCK_ELEMENTS", 1 << block_bits)
        for slots in (inputs["slots"], paged, single):
            assert torch.equal(placed(slots, whole), expected)
            if inputs["scales"] is None:
                assert torch.equal(placed(slots, [0, min(cut, num_tokens), num_tokens]), expected)


@pytest.mark.parametrize("implementation", PLACE.implementations)
def test_no_tokens_is_no_work(implementation: Implementation):
    inputs = dict(PLACE.make_inputs(7, num_tokens=1))
    empty = {name: inputs[name][:, :0] for name in ("k", "v", "cos", "sin")}
    with use_implementation(implementation):
        k_pages, _ = PLACE.run({**inputs, **empty, "slots": inputs["slots"][:0]})
    assert k_pages.isnan().all()


@pytest.mark.parametrize("implementation", PLACE.implementations)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_every_stored_byte_is_dequantised_before_it_is_rotated(
    implementation: Implementation, dtype: torch.dtype
):
    """All 256 bytes (NaN apart, which no entry holds), with scales that differ by channel.

    1. Placed by the implementation.
    2. Times scale, turned by the angle, in float64.
    """
    stored = torch.arange(256).to(torch.uint8).view(dtype)
    stored = torch.where(stored.float().isnan(), torch.zeros(()), stored.float()).to(dtype)
    inputs = dict(PLACE.make_inputs(11, num_tokens=8, source_dtype=dtype, group_tokens=4))
    inputs["k"] = stored.reshape(1, 8, 2, 16).repeat(3, 1, 1, 1)
    inputs["v"] = inputs["k"].flip(1)
    scales = inputs["scales"]
    with use_implementation(implementation):
        k_pages, v_pages = PLACE.run(inputs)
    keys = inputs["k"].double() * scales.k.double().repeat_interleave(4, dim=1)
    cos, sin = inputs["cos"][0].double(), inputs["sin"][0].double()
    turned = torch.cat((-keys[..., 8:], keys[..., :8]), dim=-1)
    expected = keys * cos[:, None] + turned * sin[:, None]
    slots = inputs["slots"]
    k_written, v_written = flat_slots(k_pages)[:, slots], flat_slots(v_pages)[:, slots]
    torch.testing.assert_close(k_written.double(), expected, rtol=1e-6, atol=1e-5)
    values = inputs["v"].double() * scales.v[..., None].double()
    torch.testing.assert_close(v_written.double(), values, rtol=2**-23, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.arange(3)}, r"slots has shape \(3,\), expected \(37,\)"),
        ({"slots": torch.arange(37).int()}, "slots must be int64"),
        ({"v": torch.zeros(3, 36, 2, 16)}, "v has shape"),
        ({"rope_table": (0, 0)}, "rope_table"),
        ({"rope_table": (0, 1, 0)}, "rope_table"),
        ({"rope_table": (0, -2, 0)}, "rope_table"),
        ({"cos": torch.zeros(1, 37, 16).double()}, "must be float32"),
        ({"k_pages": torch.zeros(3, 16, 5, 2, 16).transpose(1, 2)}, "must be contiguous"),
        ({"v_pages": torch.zeros(3, 5, 16, 2, 16).bfloat16()}, "v_pages are torch.bfloat16"),
        ({"v": torch.zeros(3, 37, 2, 16)}, "k is torch.bfloat16 but v is torch.float32"),
        ({name: torch.zeros(3, 37, 2, 16).char() for name in "kv"}, "torch.int8 need scales"),
        ({name: torch.zeros(3, 37, 2, 16).int() for name in "kv"}, "k must be of a float type"),
        ({"scales": SCALES}, "scales are for quantised types"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, Any], message: str):
    inputs = PLACE.make_inputs(8)
    with pytest.raises(KernelArgumentError, match=message):
        place(**{**inputs, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(3, 4, 2, 16)}, r"scales.k has shape \(3, 4, 2, 16\), expected \(3, 5"),
        ({"k": torch.zeros(3, 5, 2, 16).double()}, "scales.k must be float32"),
        ({"v": torch.zeros(3, 37)}, "scales.v must be"),
        ({"group_tokens": 0}, "group_tokens must be positive"),
    ],
)
def test_scales_that_do_not_fit_each_other_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(KernelArgumentError, match=message):
        replace(SCALES, **change)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_scales_of_another_entry_are_refused(axis: int):
    inputs = PLACE.make_inputs(8, source_dtype=torch.int8, group_tokens=8)
    other = PLACE.make_inputs(
        8,
        source_dtype=torch.int8,
        group_tokens=8,
        **[{"num_layers": 2}, {"num_tokens": 33}, {"head_dim": 32}][axis],
    )
    with pytest.raises(KernelArgumentError, match="has shape"):
        place(**{**inputs, "scales": other["scales"]})


def test_the_floor_counts_every_byte_once():
    inputs = PLACE.make_inputs(9, num_layers=1, num_tokens=2, num_kv_heads=1, head_dim=16)
    read = 2 * (2 * 16 * 2) + 2 * (2 * 16 * 4) + 2 * 8
    assert PLACE.floor(inputs).moved_bytes == read + 2 * (2 * 16 * 4)
    inputs = PLACE.make_inputs(
        9, num_layers=1, num_tokens=2, num_kv_heads=1, head_dim=16, source_dtype=torch.int8
    )
    read = 2 * (2 * 16) + 4 * (16 + 2) + 2 * (2 * 16 * 4) + 2 * 8
    assert PLACE.floor(inputs).moved_bytes == read + 2 * (2 * 16 * 4)
