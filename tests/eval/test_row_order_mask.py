"""CacheBlend as shipped: a mask by row order shows rows in the middle what stands behind them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkcache_eval.quality.row_order_mask import bottom_right_positions
from chunkcache_kernels.attend_rows.op import column_mass
from chunkcache_kernels.paged import KeySlots


def _as_shipped(plan: Any) -> Any:
    return replace(plan, mask_positions=bottom_right_positions)


@given(st.lists(st.booleans(), min_size=1, max_size=40).filter(any))
def test_no_row_is_masked_before_its_place_and_a_suffix_not_behind_it(runs: list[bool]) -> None:
    rows = torch.tensor([p for p, is_running in enumerate(runs) if is_running])
    masked_at = bottom_right_positions(rows, len(runs))
    assert bool((masked_at >= rows).all())
    assert masked_at.tolist() == [len(runs) - len(rows) + i for i in range(len(rows))]
    is_suffix = all(runs[int(rows[0]) :])
    assert torch.equal(masked_at, rows) == is_suffix


def test_an_early_row_has_attention_on_the_future() -> None:
    """Row 2 of 8 alone with the last two: by position it sees 3 keys, by row order 6."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(3, 4, 16, generator=generator), torch.randn(8, 1, 2, 16, generator=generator)
    rows = torch.tensor([2, 6, 7])
    keys = KeySlots.of(torch.arange(8), torch.arange(8))

    def mass_behind(positions: torch.Tensor) -> float:
        of_first = column_mass(q[:1], k, keys, positions[:1], scale=0.25, reduce="sum")
        return float(of_first[3:].sum())

    assert mass_behind(rows) == 0.0
    assert mass_behind(bottom_right_positions(rows, 8)) > 0.1


def test_what_stands_later_changes_earlier_rows(bench_of: Callable[..., Any]) -> None:
    """The counterpart of the invariant that changing the future changes nothing."""
    bench = bench_of("llama", num_hidden_layers=4)
    question = bench.draw(5, 7)
    a, b, c = bench.draw(30, 1), bench.draw(30, 2), bench.draw(30, 3)
    plans = [bench.plan(chunks, "lego", question=question) for chunks in ([a, b], [a, c])]
    end = plans[0].layout.chunks[0].end
    one, other = (bench.run(plan) for plan in plans)
    assert torch.equal(one.k[:, :end], other.k[:, :end])
    one, other = (bench.run(_as_shipped(plan)) for plan in plans)
    assert torch.equal(one.k[0, :end], other.k[0, :end]), "the first layer's are projected before"
    assert not torch.equal(one.k[1, :end], other.k[1, :end])


def test_it_moves_the_answer_away_unless_every_row_runs(bench_of: Callable[..., Any]) -> None:
    bench = bench_of("llama", num_hidden_layers=4)
    chunks = [bench.draw(40, 1), bench.draw(40, 2), bench.draw(40, 3)]
    for ratio, differs in ((0.2, True), (1.0, False)):
        plan = bench.plan(chunks, "deviation", recompute_ratio=ratio)
        right, wrong = bench.run(plan).outcome, bench.run(_as_shipped(plan)).outcome
        distance = float((right.logits - wrong.logits).abs().max())
        assert (distance > 1e-3) == differs
        assert right.report.charged_ratio == wrong.report.charged_ratio


@pytest.mark.parametrize("ratio", [0.999, 1.0])
def test_with_every_row_it_is_the_full_prefill(bench_of: Callable[..., Any], ratio: float) -> None:
    """Rows are positions then; a given answer that rides along changes nothing about it."""
    bench = bench_of("llama", num_hidden_layers=3)
    plan = bench.plan([bench.draw(30, 1), bench.draw(30, 2)], "deviation", recompute_ratio=ratio)
    parts = replace(plan.parts, answer_ids=(40, 41))
    run = bench.run(_as_shipped(replace(plan, parts=parts, layout=parts.layout())))
    plain = bench.plain_logits(run.layout.token_ids)
    assert (run.outcome.logits - plain[-3]).abs().max() <= 1e-4
    assert (run.outcome.answer_logits - plain[-2:]).abs().max() <= 1e-4
