"""Invariant 2: assembled layer-0 keys and values equal a plain forward's, in every mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkcache.testing import TINY_FAMILIES

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _check_layer_0(bench: Any, run: Any) -> None:
    k, v = bench.plain_kv(run.layout.token_ids)
    assert (run.k[0] - k[0]).abs().max() <= 1e-5
    assert (run.v[0] - v[0]).abs().max() <= 1e-5


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize(
    "policy", ["none", "lego", "deviation", "shift", "query", "hybrid", "random"]
)
def test_every_policy(bench_of: Callable[..., Any], family: str, policy: str) -> None:
    bench = bench_of(family)
    repeated = bench.draw(21, 1)
    chunks = [repeated, bench.draw(30, 2), repeated, bench.draw(1, 3)]
    _check_layer_0(bench, bench.run(bench.plan(chunks, policy)))


@pytest.mark.parametrize("preparation", ["alone", "sink(3)", "system", "preamble"])
def test_every_preparation(bench_of: Callable[..., Any], preparation: str) -> None:
    bench = bench_of("llama", max_position_embeddings=2048)
    chunks = [bench.draw(40, 1), bench.draw(25, 2)]
    _check_layer_0(bench, bench.run(bench.plan(chunks, "none", preparation=preparation)))


@pytest.mark.parametrize(
    "rope",
    [LLAMA3, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}],
    ids=lambda r: r["rope_type"],
)
def test_scaled_rotations(bench_of: Callable[..., Any], rope: dict[str, Any]) -> None:
    """For ``dynamic``, the assembled length (over 64) sets the base, not the chunk's."""
    bench = bench_of("llama", max_position_embeddings=64, rope_parameters=rope)
    chunks = [bench.draw(40, 1), bench.draw(40, 2)]
    _check_layer_0(bench, bench.run(bench.plan(chunks, "none")))


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
    scatter=st.booleans(),
)
def test_any_offset_order_and_page_layout(
    load_tiny: Callable[..., Any],
    make_bench: Callable[..., Any],
    lengths: list[int],
    order: Any,
    scatter: bool,
) -> None:
    bench = make_bench(load_tiny("llama"), page_tokens=5, scatter_pages=scatter)
    chunks = [bench.draw(n, i) for i, n in enumerate(lengths)]
    order.shuffle(chunks)
    _check_layer_0(bench, bench.run(bench.plan(chunks, "none")))


def test_the_demo_model(demo_model: Any, make_bench: Callable[..., Any]) -> None:
    bench = make_bench(demo_model)
    chunks = [bench.draw(50, 1), bench.draw(70, 2)]
    _check_layer_0(bench, bench.run(bench.plan(chunks, "hybrid", preparation="preamble")))


def test_reuse_without_recompute_is_concatenation(bench_of: Callable[..., Any]) -> None:
    """``r = 0``.

    1. Each chunk's keys and values from a plain forward of the chunk alone, moved by rotation.
    2. What the pages hold after policy ``none``, in every layer.
    """
    bench = bench_of("llama")
    chunks = [bench.draw(20, 1), bench.draw(31, 2)]
    run = bench.run(bench.plan(chunks, "none"))
    zero = bench.run(bench.plan(chunks, "hybrid", recompute_ratio=0.0))
    # Close, not equal: `none` runs its rows in stages, which end with the documents.
    assert (zero.outcome.logits - run.outcome.logits).abs().max() <= 1e-4
    for segment in run.layout.chunks:
        k, v = bench.plain_kv(segment.token_ids)
        rotated = _moved(bench, k, segment.start)
        placed = slice(segment.start, segment.end)
        assert (run.v[:, placed] - v).abs().max() <= 1e-5
        assert (run.k[:, placed] - rotated).abs().max() <= 1e-5


def _moved(bench: Any, k: torch.Tensor, offset: int) -> torch.Tensor:
    """Rotate already rotated keys ``[L, T, H, D]`` on by ``offset`` positions, in fp64."""
    dim = k.shape[-1]
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = offset * frequencies
    a, b = k[..., : dim // 2].double(), k[..., dim // 2 :].double()
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).float()
