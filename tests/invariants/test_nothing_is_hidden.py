"""Invariant 7: every prompt token is counted once; every fallback has a reason."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkcache.accounting import PromptTokenAccount
from chunkcache.fusion.plan import FusionLimits
from chunkcache.planning import AskOptions

POLICIES = ("full", "none", "lego", "deviation", "shift", "query", "hybrid", "random")


def test_an_account_that_does_not_add_up_cannot_be_built() -> None:
    with pytest.raises(AssertionError):
        PromptTokenAccount(10, 0, 5, 3, 1, {"disk": 5})
    with pytest.raises(AssertionError):
        PromptTokenAccount(10, 0, 5, 3, 2, {"disk": 4})
    with pytest.raises(AssertionError):
        PromptTokenAccount(10, 0, 5, 3, 2, {"disk": 5}, cache_write_tokens=3)
    assert PromptTokenAccount(10, 1, 4, 3, 2, {"disk": 5}).cached_tokens == 5


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    lengths=st.lists(st.integers(1, 30), max_size=4),
    ratio=st.floats(0, 1),
    question=st.integers(0, 6),
)
def test_every_token_is_counted_once(
    bench_of: Callable[..., Any], policy: str, lengths: list[int], ratio: float, question: int
) -> None:
    bench = bench_of("llama")
    has_ratio = policy in ("deviation", "shift", "query", "hybrid", "random")
    options = {"recompute_ratio": ratio} if has_ratio else {}
    chunks = [bench.draw(n, i) for i, n in enumerate(lengths)]
    plan = bench.plan(chunks, policy, question=bench.draw(question, 99), **options)
    for is_cold in (True, False):
        report = bench.run(plan).outcome.report
        account = report.account
        assert account.prompt_tokens == plan.layout.num_tokens
        num_context = sum(lengths)
        assert sum(d.tokens for d in report.documents) == num_context
        if has_ratio and lengths:
            expected = int(ratio * num_context + 0.5)
            assert sum(d.recomputed_tokens for d in report.documents) == expected
        if is_cold and plan.policy.places_entries and len(set(chunks)) == len(chunks):
            continue
        if plan.policy.places_entries:
            assert account.fused_tokens + account.recomputed_tokens == num_context
            opening = plan.layout.prefix_end
            assert account.exact_prefix_tokens == (opening if lengths else 0)
            assert sum(account.cached_tokens_by_source.values()) == account.cached_tokens
            assert set(account.cached_tokens_by_source) == ({"host"} if lengths else set())


@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_recomputed_counts_are_the_documented_rounding(
    bench_of: Callable[..., Any], ratio: float
) -> None:
    bench = bench_of("llama")
    chunks = [bench.draw(100, 1), bench.draw(100, 2)]
    bench.run(bench.plan(chunks, "none"))
    report = bench.run(bench.plan(chunks, "deviation", recompute_ratio=ratio)).outcome.report
    assert report.account.recomputed_tokens == round(200 * ratio)
    assert report.nominal_ratio == ratio


@pytest.mark.parametrize(
    ("limits", "ratio", "code"),
    [
        (FusionLimits(1000, 0, 2.0), 0.1, "context_too_short"),
        (FusionLimits(0, 64, 2.0), 0.1, "chunks_too_short"),
        (FusionLimits(0, 0, 0.6), 0.6, "ratio_too_high"),
    ],
)
def test_where_fusion_cannot_pay_it_runs_in_full_and_says_so(
    bench_of: Callable[..., Any], limits: FusionLimits, ratio: float, code: str
) -> None:
    bench = bench_of("llama")
    plan = bench.plan([bench.draw(50, 1)], "query", limits=limits, recompute_ratio=ratio)
    report = bench.run(plan).outcome.report
    assert [w.code for w in report.warnings] == [code]
    assert report.policy == "full"
    assert report.requested_policy.startswith("query")
    assert report.exact


def test_the_charge_counts_probes_and_fixed_rows(bench_of: Callable[..., Any]) -> None:
    """By hand, for two layers: rows of the probe (both layers) and of the recompute.

    The opening is an entry: only ``full`` runs its rows.
    """
    bench = bench_of("llama")
    chunks = [bench.draw(60, 1), bench.draw(40, 2)]
    plan = bench.plan(chunks, "query", recompute_ratio=0.25)
    num_fixed = plan.layout.num_tokens - plan.layout.prefix_end - 100
    num_probed = len(plan.layout.query_positions)
    charged = bench.run(plan).outcome.report.charged_ratio
    assert charged == pytest.approx(2 * (num_probed + num_fixed + 25) / 200)
    early = bench.plan(chunks, "query", recompute_ratio=0.25, layers="0-0")
    charged = bench.run(early).outcome.report.charged_ratio
    assert charged == pytest.approx((num_probed + 2 * (num_fixed + 25)) / 200)
    deviation = bench.run(bench.plan(chunks, "deviation", recompute_ratio=0.25)).outcome.report
    assert deviation.charged_ratio == pytest.approx(2 * (num_fixed + 100) / 200)
    full = bench.run(bench.plan(chunks, "full")).outcome.report
    assert full.charged_ratio == pytest.approx(2 * plan.layout.num_tokens / 200)
    none = bench.run(bench.plan(chunks, "none")).outcome.report
    assert none.charged_ratio == pytest.approx(2 * num_fixed / 200)


def test_usage_has_the_form_that_clients_know(
    open_cache: Callable[..., Any], passages: dict[str, str]
) -> None:
    cache = open_cache()
    for name, text in passages.items():
        cache.put(name, text)
    cold_system = AskOptions(max_tokens=4)
    answer = cache.answer("Who keeps the key?", list(passages), options=cold_system)
    usage = answer.usage
    details = usage["prompt_tokens_details"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert set(details["cached_tokens_by_source"]) == {"device", "host", "disk", "remote"}
    assert details["cached_tokens"] == sum(details["cached_tokens_by_source"].values())
    assert (
        details["cached_tokens"] + details["recomputed_tokens"] + details["computed_tokens"]
        == usage["prompt_tokens"]
    )
    assert details["cached_tokens"] == details["exact_prefix_tokens"] + details["fused_tokens"]


def test_an_exact_first_chunk_is_counted_as_a_prefix(bench_of: Callable[..., Any]) -> None:
    """Behind its own opening a chunk is what a full prefill computes, when the codec keeps it."""
    bench = bench_of("llama")
    chunks = [bench.draw(40, 1), bench.draw(30, 2)]
    run = bench.run(bench.plan(chunks, "hybrid", preparation="system", recompute_ratio=0.5))
    run = bench.run(bench.plan(chunks, "hybrid", preparation="system", recompute_ratio=0.5))
    assert run.outcome.report.account.exact_prefix_tokens == run.layout.prefix_end + 40
    assert run.outcome.report.account.recomputed_tokens == 15
    plain_k, plain_v = bench.plain_kv(run.layout.token_ids)
    end = run.layout.chunks[0].end
    assert (run.k[:, :end] - plain_k[:, :end]).abs().max() <= 1e-4
    assert (run.v[:, :end] - plain_v[:, :end]).abs().max() <= 1e-4
    lossy = bench.run(bench.plan(chunks, "none", preparation="system", codec="bf16"))
    assert lossy.outcome.report.account.exact_prefix_tokens == run.layout.prefix_end
