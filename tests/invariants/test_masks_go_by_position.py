"""Invariant 3: a row sees exactly the slots at or before its position; garbage never leaks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from chunkcache.fusion.cost import CostMeter
from chunkcache.fusion.recompute import SequenceKV, finish_rows, run_rows


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_rows_in_several_runs_equal_rows_in_one(bench_of: Callable[..., Any], family: str) -> None:
    """Scattered rows recomputed later give what they give in order: none sees the future.

    1. All rows of a prompt run at once.
    2. All rows run, then a scattered third of them is run again over the finished pages; were a
       mask to go by row order, the rows in the middle would see what lies behind them.
    """
    bench = bench_of(family, **({"sliding_window": 16} if family == "mistral" else {}))
    ids = torch.tensor(bench.draw(90, 1))
    pages = bench.pool.allocate(90)
    assert pages is not None
    with pages:
        sequence = SequenceKV.over(bench.runner, bench.pool.k, bench.pool.v, pages.slots)
        cost = CostMeter(2)
        every = torch.arange(90)
        first = finish_rows(run_rows(bench.runner, sequence, ids, every, cost=cost))
        some = every[1::3]
        again = finish_rows(run_rows(bench.runner, sequence, ids, some, cost=cost))
    assert (again.hidden - first.hidden[some]).abs().max() <= 1e-4


@torch.inference_mode()
def test_changing_the_future_changes_nothing(bench_of: Callable[..., Any]) -> None:
    bench = bench_of("llama")
    question = bench.draw(5, 7)
    a, b, c = bench.draw(30, 1), bench.draw(30, 2), bench.draw(30, 3)
    one = bench.run(bench.plan([a, b], "lego", question=question))
    other = bench.run(bench.plan([a, c], "lego", question=question))
    end = one.layout.chunks[0].end
    assert torch.equal(one.k[:, :end], other.k[:, :end])
    assert torch.equal(one.v[:, :end], other.v[:, :end])


@pytest.mark.parametrize(
    "policy", ["full", "none", "lego", "deviation", "shift", "query", "hybrid"]
)
def test_nan_in_unused_slots_never_leaks(
    load_tiny: Callable[..., Any], make_bench: Callable[..., Any], policy: str
) -> None:
    """The bench fills every slot with NaN before anything runs."""
    model = load_tiny("llama", num_hidden_layers=3)
    bench = make_bench(model, page_tokens=16, scatter_pages=True)
    assert bool(torch.isnan(bench.pool.k).all())
    run = bench.run(bench.plan([bench.draw(37, 1), bench.draw(3, 2)], policy))
    assert bool(torch.isfinite(run.outcome.logits).all())
    assert bool(torch.isfinite(run.k).all())
    assert bool(torch.isfinite(run.v).all())


def test_scattered_pages_give_the_same_bits(
    load_tiny: Callable[..., Any], make_bench: Callable[..., Any]
) -> None:
    model = load_tiny("llama")
    runs = []
    for scatter in (False, True):
        bench = make_bench(model, page_tokens=4, scatter_pages=scatter)
        chunks = [bench.draw(50, 1), bench.draw(20, 2)]
        runs.append(bench.run(bench.plan(chunks, "hybrid")).outcome.logits)
    assert torch.equal(runs[0], runs[1])
