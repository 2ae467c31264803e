"""Rotation against the model library's own, in both conventions."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from chunkcache_kernels.checks import KernelArgumentError
from chunkcache_kernels.rotate import rotate
from chunkcache_kernels.sample import normal, random_source, rotation_tables


@pytest.mark.parametrize("rotary_dims", [16, 8, 2])
def test_equals_the_model_library_on_the_rotated_dims(rotary_dims: int):
    """Both derive the rotated head from the same tables.

    1. ours: split the first ``Drot`` dims in halves, turn each pair, keep the rest;
    2. library: ``x * cos + rotate_half(x) * sin`` over exactly those dims.
    """
    source = random_source(0)
    x = normal(source, 9, 3, 16, dtype=torch.float32)
    cos, sin = (table[0] for table in rotation_tables(source, 1, 9, rotary_dims))
    expected, _ = apply_rotary_pos_emb(
        x[None, ..., :rotary_dims], x[None, ..., :rotary_dims], cos[None], sin[None], 2
    )
    turned = rotate(x, cos, sin)
    torch.testing.assert_close(turned[..., :rotary_dims], expected[0], rtol=0, atol=1e-6)
    assert torch.equal(turned[..., rotary_dims:], x[..., rotary_dims:])


@pytest.mark.parametrize("rotary_dims", [16, 6])
def test_interleaved_is_the_same_rotation_of_pairs_that_lie_together(rotary_dims: int):
    source = random_source(1)
    x = normal(source, 5, 2, 16, dtype=torch.float32)
    cos, sin = (table[0] for table in rotation_tables(source, 1, 5, rotary_dims))
    halves = torch.cat((torch.arange(0, rotary_dims, 2), torch.arange(1, rotary_dims, 2)))
    expected = x.clone()
    expected[..., halves] = rotate(x[..., halves], cos, sin)
    assert torch.equal(rotate(x, cos, sin, interleaved=True), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_computes_in_fp32_and_rounds_once(dtype: torch.dtype):
    source = random_source(2)
    x = normal(source, 7, 2, 8, dtype=dtype)
    cos, sin = (table[0] for table in rotation_tables(source, 1, 7, 8))
    kept = x.clone()
    assert torch.equal(rotate(x, cos, sin), rotate(x.float(), cos, sin).to(dtype))
    assert torch.equal(x, kept)


def test_refuses_tables_that_do_not_fit():
    x = torch.zeros(4, 2, 8)
    with pytest.raises(KernelArgumentError, match="x has 4 tokens, cos has 3"):
        rotate(x, torch.zeros(3, 8), torch.zeros(3, 8))
    with pytest.raises(KernelArgumentError, match="at most 8, got 10"):
        rotate(x, torch.zeros(4, 10), torch.zeros(4, 10))
    with pytest.raises(KernelArgumentError, match="sin has shape"):
        rotate(x, torch.zeros(4, 8), torch.zeros(4, 6))
