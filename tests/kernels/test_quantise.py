"""``quantise``: every implementation against the reference, and the reference against float64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkcache_kernels.checks import KernelArgumentError
from chunkcache_kernels.implementation import Implementation, use_implementation
from chunkcache_kernels.quantise.op import quantise
from chunkcache_kernels.quantise.spec import QUANTISE
from chunkcache_kernels.quantised import GROUP_TOKENS, LARGEST, dequantise

TYPES = list(LARGEST)
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one token": {"num_tokens": 1},
    "one whole group": {"num_tokens": GROUP_TOKENS},
    "last group of one": {"num_tokens": GROUP_TOKENS + 1},
    "small groups": {"group_tokens": 8, "num_tokens": 20},
    "groups of no power of two": {"group_tokens": 12, "num_tokens": 30},
    "groups of one token": {"group_tokens": 1, "num_tokens": 5},
    "three heads of 24": {"num_kv_heads": 3, "head_dim": 24},
    "outliers": {"outliers": True, "num_tokens": 70},
    "bf16": {"source_dtype": torch.bfloat16},
    "fp16": {"source_dtype": torch.float16, "outliers": True},
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_triton_equals_the_reference(dtype: torch.dtype, shape: dict[str, Any]):
    QUANTISE.check("triton", QUANTISE.make_inputs(1, dtype=dtype, **shape), dtype)


def _error_bound(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far a stored number may be from the number it stands for, with room for fp32 rounding."""
    half_step = 0.5 * scale
    if dtype == torch.float8_e4m3fn:
        half_step = torch.maximum(x.abs() / 16, scale * 2**-10)
    return half_step * (1 + 2**-15) + x.abs() * 2**-21 + 1e-44


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(TYPES),
    num_tokens=st.integers(1, 80),
    group_tokens=st.sampled_from([1, 7, 16, GROUP_TOKENS]),
    num_heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 9, 64]),
    exponent=st.integers(-38, 30),
    outlier=st.sampled_from([0.0, 1.0, 1e3, 1e6]),
    seed=st.integers(0, 999),
)
def test_no_number_is_further_off_than_half_a_step_of_its_group(
    dtype: torch.dtype,
    num_tokens: int,
    group_tokens: int,
    num_heads: int,
    head_dim: int,
    exponent: int,
    outlier: float,
    seed: int,
):
    """Sizes from subnormal to 1e30; one channel that is zero, or far larger than its neighbours.

    1. Quantised and dequantised, in float64 from the stored elements and scales.
    2. The source, in float64; the scales found again from it.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (2, num_tokens, num_heads, head_dim)
    k = torch.randn(shape, generator=generator) * 10.0**exponent
    v = torch.randn(shape, generator=generator) * 10.0**exponent
    k[..., seed % head_dim] *= outlier
    k_stored, v_stored, scales = quantise(k, v, dtype, group_tokens=group_tokens)
    assert k_stored.dtype == v_stored.dtype == dtype
    for first in range(0, num_tokens, group_tokens):
        group = k[:, first : first + group_tokens].double()
        scale = scales.k[:, first // group_tokens].double()
        peak = group.abs().amax(dim=1)
        torch.testing.assert_close(scale, peak / LARGEST[dtype], rtol=2**-23, atol=2e-45)
        number = k_stored[:, first : first + group_tokens].double() * scale[:, None]
        assert ((number - group).abs() <= _error_bound(group, scale[:, None], dtype)).all()
    torch.testing.assert_close(
        scales.v.double(), v.double().abs().amax(dim=-1) / LARGEST[dtype], rtol=2**-23, atol=2e-45
    )
    number = v_stored.double() * scales.v[..., None].double()
    assert (
        (number - v.double()).abs() <= _error_bound(v.double(), scales.v[..., None], dtype)
    ).all()
    for widened, stored in zip(dequantise(k_stored, v_stored, scales), (k, v), strict=True):
        assert widened.shape == stored.shape
        assert widened.isfinite().all()


@pytest.mark.parametrize("implementation", QUANTISE.implementations)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_channel_of_zeros_stays_zero_and_its_neighbours_do_not_care(
    implementation: Implementation, dtype: torch.dtype
):
    inputs = dict(QUANTISE.make_inputs(2, dtype=dtype, num_tokens=70))
    spared = {name: inputs[name].clone() for name in "kv"}
    inputs["k"][:, :GROUP_TOKENS, 0, 3] = 0
    inputs["v"][:, 5, 1] = 0
    with use_implementation(implementation):
        k, v, scales = quantise(**inputs)
        k_spared, v_spared, _ = quantise(**{**inputs, **spared})
    assert (scales.k[:, 0, 0, 3] == 0).all()
    assert (scales.v[:, 5, 1] == 0).all()
    assert (k[:, :GROUP_TOKENS, 0, 3].float() == 0).all()
    assert (v[:, 5, 1].float() == 0).all()
    k[:, :GROUP_TOKENS, 0, 3] = k_spared[:, :GROUP_TOKENS, 0, 3]
    v[:, 5, 1] = v_spared[:, 5, 1]
    assert torch.equal(k.float(), k_spared.float())
    assert torch.equal(v.float(), v_spared.float())


@pytest.mark.parametrize("implementation", QUANTISE.implementations)
def test_an_outlier_channel_costs_the_others_nothing(implementation: Implementation):
    """Why keys have a scale per channel: one scale per token would drown 15 channels of 16."""
    inputs = QUANTISE.make_inputs(3, outliers=True)
    with use_implementation(implementation):
        _, _, k, _ = QUANTISE.run(inputs)
    quiet = [d for d in range(16) if d != 8]
    error = (k - inputs["k"])[..., quiet].abs().max()
    assert error <= 4.5 / 127 / 2
    assert inputs["k"][..., 8].abs().max() > 100


@pytest.mark.parametrize("implementation", QUANTISE.implementations)
@pytest.mark.parametrize("dtype", TYPES)
def test_the_largest_numbers_saturate_and_the_ends_of_the_range_are_used(
    implementation: Implementation, dtype: torch.dtype
):
    inputs = QUANTISE.make_inputs(4, dtype=dtype)
    with use_implementation(implementation):
        k, v, _ = quantise(**inputs)
    for stored in (k, v):
        assert stored.float().abs().max() == LARGEST[dtype]
        assert stored.float().isfinite().all()
    assert (k.float().abs().amax(dim=1) == LARGEST[dtype]).all()
    assert (v.float().abs().amax(dim=-1) == LARGEST[dtype]).all()


@pytest.mark.parametrize("implementation", QUANTISE.implementations)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_shows_in_its_scale_and_nowhere_else(
    implementation: Implementation, dtype: torch.dtype, value: float
):
    inputs = QUANTISE.make_inputs(5, dtype=dtype)
    inputs["k"][1, 3, 1, 7] = value
    inputs["v"][0, 9, 0, 2] = value
    with use_implementation(implementation):
        k, v, scales = quantise(**inputs)
    assert (~scales.k.isfinite()).nonzero().tolist() == [[1, 0, 1, 7]]
    assert (~scales.v.isfinite()).nonzero().tolist() == [[0, 9, 0]]
    assert k.float().isfinite().all()
    assert v.float().isfinite().all()


@pytest.mark.parametrize("implementation", QUANTISE.implementations)
def test_takes_rows_cut_out_of_a_larger_tensor(implementation: Implementation):
    inputs = dict(QUANTISE.make_inputs(6))
    wide = {name: torch.cat((inputs[name] * 9, inputs[name]), dim=1)[:, 37:] for name in "kv"}
    assert not wide["k"].is_contiguous()
    with use_implementation(implementation):
        whole, cut = QUANTISE.run(inputs), QUANTISE.run({**inputs, **wide})
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


@pytest.mark.parametrize("implementation", QUANTISE.implementations)
def test_no_tokens_have_no_scales(implementation: Implementation):
    inputs = dict(QUANTISE.make_inputs(7))
    empty = {name: inputs[name][:, :0] for name in "kv"}
    with use_implementation(implementation):
        k, _, scales = quantise(**{**inputs, **empty})
    assert k.shape == (2, 0, 2, 16)
    assert scales.k.shape == (2, 0, 2, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.int16}, "dtype must be one of"),
        ({"group_tokens": 0}, "group_tokens must be positive"),
        ({"v": torch.zeros(2, 36, 2, 16)}, "v has shape"),
        ({"v": torch.zeros(2, 37, 2, 16).half()}, "of one float type"),
        ({"k": torch.zeros(37, 2, 16)}, "k must be"),
        ({name: torch.zeros(2, 37, 2, 16).char() for name in "kv"}, "of one float type"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, Any], message: str):
    with pytest.raises(KernelArgumentError, match=message):
        quantise(**{**QUANTISE.make_inputs(8), **change})


def test_the_floor_counts_every_byte_once():
    inputs = QUANTISE.make_inputs(9, num_layers=1, num_tokens=3, num_kv_heads=1, group_tokens=2)
    num_elements = 3 * 16
    scale_bytes = 4 * (2 * 16 + 3)
    assert QUANTISE.floor(inputs).moved_bytes == 2 * num_elements * (4 + 1) + scale_bytes
