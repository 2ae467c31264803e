"""Signals against their definitions, computed in another way."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from chunkcache.errors import InvalidValueError
from chunkcache.fusion.cost import CostMeter
from chunkcache.fusion.fidelity import kl_divergence, leading_agreement
from chunkcache.fusion.policy import Candidates, Narrowing, Policy, RowSelection
from chunkcache.fusion.preparation import Preparation


class _Spy(Policy):
    """Asks for a signal and keeps it."""

    name = "spy"
    seen: list[torch.Tensor]
    asked: tuple[tuple[int, ...], Any]

    def select(self, candidates: Candidates) -> RowSelection:
        self.seen.append(candidates.query_attention(*self.asked))
        return RowSelection(torch.zeros_like(candidates.positions, dtype=torch.bool))


def _spy(layers: tuple[int, ...], aggregation: str) -> _Spy:
    spy = _Spy()
    object.__setattr__(spy, "seen", [])
    object.__setattr__(spy, "asked", (layers, aggregation))
    return spy


@pytest.mark.parametrize("aggregation", ["sum", "l2"])
def test_query_attention_is_the_library_s_attention(
    bench_of: Callable[..., Any], aggregation: str
) -> None:
    """One chunk behind its own opening is exact, and without template text between it and the
    question, what the question sees is a plain forward's.

    1. The library's attention probabilities of the question's rows.
    2. The probe's mass over the placed chunk.
    """
    bench = bench_of("llama")
    spy = _spy((0, 1), aggregation)
    plan = bench.plan([bench.draw(40, 1)], spy, preparation="system", codec="raw")
    template = replace(plan.parts.template, before_question=())
    parts = replace(plan.parts, template=template)
    plan = replace(plan, parts=parts, layout=parts.layout(), reuse_is_lossless=False)
    run = bench.run(plan)
    model = bench.runner.hf_model
    ids = torch.tensor([run.layout.token_ids])
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            probabilities = model(input_ids=ids, output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    rows = torch.tensor(run.layout.query_positions)
    expected = torch.zeros(run.layout.num_tokens)
    for layer in probabilities:
        of_question = layer[0][:, rows]
        if aggregation == "sum":
            expected += of_question.sum(dim=(0, 1))
        else:
            expected += of_question.mean(dim=0).square().sum(dim=0).sqrt()
    chunk = run.layout.chunks[0]
    assert (spy.seen[0] - expected[chunk.start : chunk.end]).abs().max() <= 1e-4


def test_deviation_keeps_the_rows_whose_values_change_most(bench_of: Callable[..., Any]) -> None:
    """By hand.

    1. Stale values at layer 1 from policy ``none``, fresh ones from ``full``; the largest
       squared differences.
    2. The rows whose layer-1-and-later keys were rewritten; on two layers those are the rows
       that the report counts.
    """
    bench = bench_of("llama", num_hidden_layers=3)
    chunks = [bench.draw(30, 1), bench.draw(30, 2), bench.draw(30, 3)]
    stale = bench.run(bench.plan(chunks, "none"))
    fresh = bench.run(bench.plan(chunks, "full"))
    fused = bench.run(bench.plan(chunks, "deviation", recompute_ratio=0.2))
    positions = torch.tensor([p for s in stale.layout.chunks for p in range(s.start, s.end)])
    change = (fresh.v[1] - stale.v[1])[positions].square().sum(dim=(1, 2))
    expected = set(positions[change.argsort(descending=True)[:18]].tolist())
    rewritten = (fused.v[2] != stale.v[2]).any(dim=2).any(dim=1)
    assert {p for p in positions.tolist() if rewritten[p]} == expected
    assert fused.outcome.report.account.recomputed_tokens == 18
    # Every fresh row of the check layer is kept, chosen or not.
    assert (fused.v[1] - fresh.v[1])[positions].abs().max() <= 1e-5


def test_narrowing_before_layer_1_is_refused() -> None:
    with pytest.raises(InvalidValueError):
        Narrowing(0, 1)


def test_costs_add_up() -> None:
    cost = CostMeter(4)
    cost.charge(10)
    cost.charge(30)
    assert cost.row_layers == 40
    assert cost.charged_ratio(100) == 0.1
    assert cost.charged_ratio(0) == 0.0


def test_divergence_and_agreement() -> None:
    a, b = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 1.0, 3.0])
    assert kl_divergence(a, a) == 0.0
    p, q = torch.softmax(a.double(), 0), torch.softmax(b.double(), 0)
    assert kl_divergence(a, b) == pytest.approx(float((p * (p / q).log()).sum()))
    assert leading_agreement([1, 2, 3], [1, 2, 4]) == pytest.approx(2 / 3)
    assert leading_agreement([], []) == 1.0
    assert leading_agreement([1], []) == 0.0


@pytest.mark.parametrize("text", ["alone", "sink(3)", "system", "preamble", "neighbours(3)"])
def test_preparations_read_back(text: str) -> None:
    assert str(Preparation.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "sink(0)", "sink(-1)", "preambles", "neighbors", "neighbours(0)", "neighbours(17)"],
)
def test_unknown_preparations_are_refused(text: str) -> None:
    with pytest.raises(InvalidValueError):
        Preparation.parse(text)


def test_a_number_that_is_left_out_is_the_usual_one() -> None:
    assert str(Preparation.parse("neighbours")) == "neighbours(2)"
    assert str(Preparation.parse("sink")) == "sink(4)"


def test_a_sink_is_bos_and_neutral_tokens(load_tiny: Callable[..., Any]) -> None:
    model = load_tiny("llama")
    newline = model.tokenizer.encode_template("\n")[0]
    prefix = Preparation.parse("sink(3)").prefix_ids(
        model.template, model.tokenizer, model.bos_token_id, ()
    )
    assert prefix == (model.bos_token_id, newline, newline)
    without = Preparation.parse("sink(2)").prefix_ids(model.template, model.tokenizer, None, ())
    assert without == (newline, newline)
