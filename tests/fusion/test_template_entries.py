"""Template text as entries: exact where it opens a prompt, a stand-in further in."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from chunkcache.codecs import codec_by_name
from chunkcache.entry import Entry
from chunkcache.fusion.template_entries import TemplateEntries
from chunkcache.identity import EntryIdentity

Benches = Callable[..., Any]


def _identity(bench: Any, token_ids: tuple[int, ...]) -> EntryIdentity:
    plan = bench.plan([bench.draw(20, 1)])
    return replace(plan.identities[0], prefix_ids=(), token_ids=token_ids)


def _entries(bench: Any, capacity_bytes: int) -> TemplateEntries:
    return TemplateEntries(bench.prefill, codec_by_name("raw", bench.runner.dtype), capacity_bytes)


def test_the_opening_is_exact_and_never_runs(bench_of: Benches) -> None:
    """1. Keys and values of the opening in the pages equal a plain forward's.
    2. Its tokens are computed once, then an exact prefix from memory.
    """
    bench = bench_of("llama")
    plan = bench.plan([bench.draw(50, 1)], "none")
    end = plan.layout.prefix_end
    accounts = []
    for _ in range(2):
        run = bench.run(plan)
        plain_k, plain_v = bench.plain_kv(run.layout.token_ids)
        assert (run.k[:, :end] - plain_k[:, :end]).abs().max() <= 1e-5
        assert (run.v[:, :end] - plain_v[:, :end]).abs().max() <= 1e-5
        accounts.append(run.outcome.report.account)
    assert [a.exact_prefix_tokens for a in accounts] == [0, end]
    assert accounts[0].computed_tokens - accounts[1].computed_tokens >= end


def test_an_answer_does_not_depend_on_whether_the_template_was_known(bench_of: Benches) -> None:
    bench = bench_of("llama")
    plan = bench.plan([bench.draw(50, 1), bench.draw(60, 2)], "hybrid", recompute_ratio=0.2)
    first, again = bench.run(plan).outcome, bench.run(plan).outcome
    assert torch.equal(first.logits, again.logits)


def test_a_stand_in_changes_no_row_that_runs(bench_of: Benches) -> None:
    """Every template row is run again, so with all chunk rows run the result is a full prefill's."""
    bench = bench_of("llama")
    chunks = [bench.draw(50, 1), bench.draw(60, 2)]
    run = bench.run(bench.plan(chunks, "query", recompute_ratio=1.0))
    plain = bench.plain_logits(run.layout.token_ids)[-1]
    assert (run.outcome.logits - plain).abs().max() <= 1e-4


def test_a_rotation_that_depends_on_the_length_has_no_exact_opening(bench_of: Benches) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    bench = bench_of("llama", rope_parameters=rope, max_position_embeddings=64)
    plan = bench.plan([bench.draw(80, 1), bench.draw(40, 2)], "query", recompute_ratio=1.0)
    for _ in range(2):
        run = bench.run(plan)
        assert run.outcome.report.account.exact_prefix_tokens == 0
        plain = bench.plain_logits(run.layout.token_ids)[-1]
        assert (run.outcome.logits - plain).abs().max() <= 1e-4


def test_entries_stay_within_their_budget(bench_of: Benches) -> None:
    """The least recently used goes; one that is larger than the budget is used and not kept."""
    bench = bench_of("llama")
    names = [_identity(bench, bench.draw(10, seed)) for seed in range(3)]
    with _entries(bench, 1 << 30).get(names[0]) as lease:
        num_bytes = lease.entry.num_bytes
    entries = _entries(bench, 2 * num_bytes)

    def sources(order: list[int]) -> list[str]:
        found = []
        for index in order:
            with entries.get(names[index]) as lease:
                found.append(lease.source)
        return found

    assert sources([0, 1, 0, 2, 0]) == ["computed", "computed", "host", "computed", "host"]
    assert sources([1]) == ["computed"]
    entries = _entries(bench, num_bytes - 1)
    assert sources([0, 0]) == ["computed", "computed"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_opening_that_is_not_finite_runs_in_place(bench_of: Benches, value: float) -> None:
    bench = bench_of("llama")
    plan = bench.plan([bench.draw(50, 1)], "none")
    sound = bench.run(plan).outcome

    class Spoiling:
        def compute(self, identity: EntryIdentity, codec: Any) -> Entry:
            entry = bench.prefill.compute(identity, codec)
            entry.k[0, 0, 0, 0] = value
            return entry

    codec = codec_by_name("raw", bench.runner.dtype)
    bench.templates = TemplateEntries(cast(Any, Spoiling()), codec, 1 << 26)
    met = bench.run(plan).outcome
    assert met.report.account.exact_prefix_tokens == 0
    assert (met.logits - sound.logits).abs().max() <= 1e-5


def test_a_prompt_without_its_chunks_counts_no_more_than_its_opening(bench_of: Benches) -> None:
    """Every chunk is missing and left out: the question still runs, and is counted as run."""
    bench = bench_of("llama")
    plan = bench.plan([bench.draw(50, 1), bench.draw(40, 2)], "query")
    plan = replace(plan, on_miss="skip")
    opening = plan.layout.opening_end
    assert opening == plan.layout.prefix_end > 0
    for exact in (0, opening):
        run = bench.run(plan)
        assert not run.layout.chunks
        account = run.outcome.report.account
        assert account.exact_prefix_tokens == account.cached_tokens == exact
        assert account.computed_tokens == run.layout.num_tokens - exact
        plain = bench.plain_logits(run.layout.token_ids)[-1]
        assert (run.outcome.logits - plain).abs().max() <= 1e-4


def test_a_prompt_that_is_all_opening_still_runs(bench_of: Benches) -> None:
    bench = bench_of("llama")
    plan = bench.plan([bench.draw(50, 1)], "none", question=())
    template = replace(plan.parts.template, before_question=(), after_question=())
    parts = replace(plan.parts, template=template)
    plan = replace(plan, parts=parts, layout=parts.layout(), on_miss="skip")
    for _ in range(2):
        run = bench.run(plan)
        assert run.outcome.report.account.computed_tokens == run.layout.num_tokens
        plain = bench.plain_logits(run.layout.token_ids)[-1]
        assert (run.outcome.logits - plain).abs().max() <= 1e-4
