"""``auto``: the smallest row set whose bound is within the target, or everything."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkcache.errors import InvalidValueError
from chunkcache.fusion.policies.auto import Auto
from chunkcache.fusion.policies.auto_rows import row_sets
from chunkcache.fusion.policies.auto_table import AutoRatio, AutoTable
from chunkcache.fusion.policies.full import Full
from chunkcache.fusion.policies.hybrid import Hybrid
from chunkcache.fusion.policy import Candidates, rows_of_ratio

RATIOS = (0.25, 0.5)
NUM_LAYERS = 3


def _table(*says: float, slope: float = 0.0, margin: float = 0.0) -> AutoTable:
    """One that says a fixed divergence of each ratio, times a power of the stale share."""
    return AutoTable(
        model_name="tiny",
        preparation="alone",
        codec="raw",
        fingerprint="",
        num_questions=40,
        num_context_tokens=100,
        choices=tuple(
            AutoRatio(r, (math.log(kl), slope)) for r, kl in zip(RATIOS, says, strict=True)
        ),
        margin=margin,
    )


def _policy(*says: float) -> Auto:
    return Auto(0.02).with_table(_table(*says))


@pytest.fixture
def bench(bench_of: Callable[..., Any]) -> Any:
    return bench_of("llama", num_hidden_layers=NUM_LAYERS)


@pytest.fixture
def chunks(bench: Any) -> list[tuple[int, ...]]:
    return [bench.draw(24, 1), bench.draw(9, 2), bench.draw(15, 3)]


def _candidates(lengths: list[int], scores: torch.Tensor) -> tuple[Candidates, list[str]]:
    asked: list[str] = []

    def attention(layers: tuple[int, ...], how: str) -> torch.Tensor:
        asked.append(how)
        return scores

    size = sum(lengths)
    candidates = Candidates(
        positions=torch.arange(10, 10 + size),
        chunk_of=torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)]),
        offset_in_chunk=torch.tensor([o for n in lengths for o in range(n)]),
        num_layers=NUM_LAYERS,
        query_attention=attention,
    )
    return candidates, asked


def test_it_runs_the_least_ratio_that_is_close_enough(bench: Any, chunks: Any) -> None:
    """1. The first will do. 2. The second does. Bits and cost are those of ``hybrid`` there."""
    bench.run(bench.plan(chunks, "none"))
    for says, ratio, kl in (((0.01, 0.001), 0.25, 0.01), ((0.5, 0.015), 0.5, 0.015)):
        run = bench.run(bench.plan(chunks, _policy(*says)))
        fixed = bench.run(bench.plan(chunks, Hybrid(ratio)))
        assert torch.equal(run.outcome.logits, fixed.outcome.logits)
        assert torch.equal(run.v, fixed.v)
        report = run.outcome.report
        assert report.estimate.ratio == ratio
        assert report.estimate.estimated_kl == pytest.approx(kl)
        assert report.estimate.target_kl == 0.02
        assert not report.estimate.ran_full
        assert not report.exact
        # At 25 % first tokens fill the budget of ``hybrid``, which does not look at the question.
        probe = 0 if ratio == 0.5 else report.charged_ratio - fixed.outcome.report.charged_ratio
        assert report.charged_ratio == pytest.approx(fixed.outcome.report.charged_ratio + probe)
        assert probe >= 0
        recomputed = sum(d.recomputed_tokens for d in report.documents)
        assert recomputed == rows_of_ratio(ratio, 48)
        assert report.account == fixed.outcome.report.account
        assert str(report.policy) == "auto(0.02)"


def test_where_no_ratio_will_do_everything_runs(bench: Any, chunks: Any) -> None:
    """The answer is the full prefill's, and says so; the probe is charged on top."""
    bench.run(bench.plan(chunks, "none"))
    run = bench.run(bench.plan(chunks, _policy(1.0, 1.0)))
    full = bench.run(bench.plan(chunks, Full()))
    assert torch.allclose(run.outcome.logits, full.outcome.logits, atol=1e-4)
    report = run.outcome.report
    assert report.exact
    assert report.estimate.ran_full
    assert report.estimate.estimated_kl == 0.0
    assert report.estimate.ratio == 1.0
    assert report.account.recomputed_tokens == 48
    assert report.account.fused_tokens == 0
    assert report.charged_ratio > 1.0


def test_the_same_request_gives_the_same_bits_with_and_without_an_answer(
    bench: Any, chunks: Any
) -> None:
    plan = bench.plan(chunks, _policy(1.0, 0.01))
    run, again = bench.run(plan), bench.run(plan)
    assert torch.equal(run.outcome.logits, again.outcome.logits)
    assert torch.equal(run.v, again.v)
    scored = bench.run(plan.scoring((40, 41, 42)))
    assert scored.outcome.report.estimate == run.outcome.report.estimate
    assert scored.outcome.answer_logits.shape[0] == 3


def test_a_prompt_without_chunks_has_nothing_to_estimate(bench: Any) -> None:
    run = bench.run(bench.plan([], _policy(1.0, 1.0)))
    assert run.outcome.report.estimate is None
    assert run.outcome.report.exact


def test_the_more_attention_is_left_stale_the_more_runs() -> None:
    """Attention to two tokens alone is covered by few rows; spread evenly, it takes more."""
    table = _table(0.03, 0.03, slope=1.0)
    policy = Auto(0.02).with_table(table)
    narrow = torch.full((80,), 1e-4)
    narrow[[30, 70]] = 1.0
    for scores, share in ((narrow, 0.25), (torch.ones(80), 0.5)):
        candidates, _ = _candidates([40, 40], scores)
        selection = policy.select(candidates)
        assert int(selection.chosen.sum()) == rows_of_ratio(share, 80)


@pytest.mark.parametrize("target", [0.0, -0.02, math.nan, math.inf])
def test_a_target_that_is_none_is_refused(target: float) -> None:
    with pytest.raises(InvalidValueError, match="target_kl"):
        Auto(target)


def test_a_bound_by_hand() -> None:
    table = _table(0.5, 1.0, slope=2.0, margin=0.3)
    assert table.bound(0, (-1.0,)) == pytest.approx(0.5 * math.exp(-2.0 + 0.3))
    assert table.bound(1, (1e9,)) == pytest.approx(math.exp(50))


def test_signals_by_hand() -> None:
    """Two chunks of four; the budget of two takes the first token of each, half the attention."""
    scores = torch.tensor([2.0, 0.5, 0.5, 0.0, 2.0, 1.0, 1.0, 1.0])
    candidates, asked = _candidates([4, 4], scores)
    none, some, every = row_sets(candidates, (0.0, 0.25, 1.0))
    assert some.chosen.tolist() == [True, False, False, False] * 2
    assert none.signals == pytest.approx((0.0,))
    assert some.signals == pytest.approx((math.log(0.5),))
    assert every.signals[0] == pytest.approx(math.log(1e-6))
    assert asked == ["sum"]


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    ratios=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    says=st.lists(st.sampled_from([0.001, 0.02, 0.5]), min_size=2, max_size=2),
)
def test_row_sets_keep_their_budget_and_leave_less_and_less(
    lengths: list[int], seed: int, ratios: list[float], says: list[float]
) -> None:
    """1. The budget, to the row. 2. The stale share falls, and the probe runs once. 3. The choice
    is one of the sets, or everything."""
    size = sum(lengths)
    scores = torch.rand(size, generator=torch.Generator().manual_seed(seed))
    candidates, asked = _candidates(lengths, scores)
    sets = list(row_sets(candidates, sorted(ratios)))
    assert [int(s.chosen.sum()) for s in sets] == [rows_of_ratio(r, size) for r in sorted(ratios)]
    assert len(asked) == 1
    assert all(0 >= s.signals[0] >= math.log(1e-6) - 1e-9 for s in sets)
    selection = _policy(*says).select(candidates)
    allowed = [s.chosen for s in row_sets(candidates, RATIOS)]
    fitting = [rows for rows, kl in zip(allowed, says, strict=True) if kl < 0.03]
    expected = fitting[0] if fitting else torch.ones(size, dtype=torch.bool)
    assert torch.equal(selection.chosen, expected)
    assert selection.estimate is not None
    assert selection.estimate.ran_full == (not fitting)


def test_smaller_sets_need_a_larger_bound_only_by_what_they_leave() -> None:
    candidates, _ = _candidates([30, 30], torch.linspace(0, 1, 60))
    shares = [s.signals[0] for s in row_sets(candidates, (0.1, 0.2, 0.4, 0.8))]
    assert all(b < a for a, b in pairwise(shares))


def test_a_policy_without_its_table_cannot_run(bench: Any, chunks: Any) -> None:
    plan = replace(bench.plan(chunks, _policy(1.0, 1.0)), policy=Auto(0.02))
    with pytest.raises(AssertionError, match="table"):
        bench.run(plan)
