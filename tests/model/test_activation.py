"""Activations: the same bits wherever an element stands, on any number of threads."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chunkcache.model import activation
from chunkcache.model.activation import in_whole_vectors


@pytest.fixture(scope="module", autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (F.silu, _gelu_tanh, F.gelu)


@settings(max_examples=40, deadline=None)
@given(
    function=st.sampled_from(FUNCTIONS),
    num_rows=st.integers(1, 300),
    num_columns=st.sampled_from([1, 7, 64, 100, 256, 1536]),
    num_threads=st.integers(1, 7),
    first=st.integers(0, 299),
)
def test_an_element_has_the_same_bits_wherever_it_stands(
    function: Callable[[Tensor], Tensor],
    num_rows: int,
    num_columns: int,
    num_threads: int,
    first: int,
) -> None:
    x = torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(num_rows))
    torch.set_num_threads(1)
    whole = in_whole_vectors(function, x)
    assert torch.allclose(whole, function(x), atol=1e-6)
    torch.set_num_threads(num_threads)
    first = min(first, num_rows - 1)
    assert torch.equal(in_whole_vectors(function, x[first:]), whole[first:])


@given(num_elements=st.integers(1, 10**8), num_threads=st.integers(1, 256))
def test_shares_are_whole_vectors(num_elements: int, num_threads: int) -> None:
    num_even = activation._num_even(num_elements, num_threads)
    assert 0 <= num_even <= num_elements
    for num_shares in (activation._num_shares(num_even, num_threads), num_threads):
        assert num_even % (num_shares * activation.VECTOR_ELEMENTS) == 0


def test_shapes_and_types_stay() -> None:
    for shape in ((), (0, 5), (3, 1, 2)):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.ones(shape, dtype=dtype)
            out = in_whole_vectors(F.silu, x)
            assert (out.shape, out.dtype) == (x.shape, x.dtype)
