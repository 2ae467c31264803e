"""Invariant 1: policy ``full``, and any policy that recomputes every row, is the plain forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from chunkcache.testing import TINY_FAMILIES

ROPE_TYPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
}


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("policy", ["full", "hybrid", "query", "deviation", "shift", "random"])
def test_recomputing_every_row_gives_the_plain_forward(
    bench_of: Callable[..., Any], family: str, policy: str
) -> None:
    """Two ways to the same logits.

    1. The library's forward over the assembled ids.
    2. Chunks prefilled alone, placed, and every row recomputed by our executor.
    """
    bench = bench_of(family)
    chunks = [bench.draw(40, 1), bench.draw(1, 2), bench.draw(23, 3)]
    options = {} if policy == "full" else {"recompute_ratio": 1.0}
    run = bench.run(bench.plan(chunks, policy, **options))
    plain = bench.plain_logits(run.layout.token_ids)[-1]
    assert (run.outcome.logits - plain).abs().max() <= 1e-4
    assert run.outcome.logits.argmax() == plain.argmax()
    assert run.outcome.report.exact


@pytest.mark.parametrize("rope", ROPE_TYPES)
def test_every_kind_of_rope_scaling_is_exact(bench_of: Callable[..., Any], rope: str) -> None:
    bench = bench_of("llama", max_position_embeddings=128, rope_parameters=ROPE_TYPES[rope])
    run = bench.run(
        bench.plan([bench.draw(60, 1), bench.draw(50, 2)], "hybrid", recompute_ratio=1.0)
    )
    plain = bench.plain_logits(run.layout.token_ids)[-1]
    assert (run.outcome.logits - plain).abs().max() <= 1e-4


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_sliding_windows_are_exact(bench_of: Callable[..., Any], family: str) -> None:
    extra = {} if family == "mistral" else {"use_sliding_window": True, "max_window_layers": 1}
    bench = bench_of(family, sliding_window=20, **extra)
    assert 20 in bench.runner.spec.windows
    run = bench.run(bench.plan([bench.draw(60, 1), bench.draw(50, 2)], "full"))
    plain = bench.plain_logits(run.layout.token_ids)[-1]
    assert (run.outcome.logits - plain).abs().max() <= 1e-4


@pytest.mark.parametrize("num_question_tokens", [0, 1, 2, 3])
@pytest.mark.parametrize("page_tokens", [1, 7, 16])
def test_short_questions_and_any_page_size(
    bench_of: Callable[..., Any], num_question_tokens: int, page_tokens: int
) -> None:
    bench = bench_of("llama", page_tokens=page_tokens)
    question = bench.draw(num_question_tokens, 9)
    run = bench.run(bench.plan([bench.draw(33, 1)], "full", question=question))
    plain = bench.plain_logits(run.layout.token_ids)[-1]
    assert (run.outcome.logits - plain).abs().max() <= 1e-4


def test_the_demo_model_is_exact(demo_model: Any, make_bench: Callable[..., Any]) -> None:
    bench = make_bench(demo_model)
    chunks = [bench.draw(90, 1), bench.draw(60, 2)]
    plain = None
    for policy, options in (("full", {}), ("hybrid", {"recompute_ratio": 1.0})):
        run = bench.run(bench.plan(chunks, policy, preparation="preamble", **options))
        if plain is None:
            plain = bench.plain_logits(run.layout.token_ids)[-1]
        assert (run.outcome.logits - plain).abs().max() <= 1e-4
        assert torch.equal(run.outcome.logits.argmax(), plain.argmax())


def test_greedy_answers_equal_the_library_s(
    open_cache: Callable[..., Any], passages: dict[str, str]
) -> None:
    cache = open_cache()
    for name, text in passages.items():
        cache.put(name, text)
    answer = cache.answer(
        "When was the bridge built?", list(passages), policy="full", max_tokens=20
    )
    plan = cache.stream("When was the bridge built?", list(passages)).plan
    runner = cache.runtime.model.runner
    ids = torch.tensor([plan.layout.token_ids])
    generated = runner.hf_model.generate(
        ids, max_new_tokens=20, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(ids)
    )
    assert generated[0, ids.shape[1] :].tolist() == list(answer.token_ids)
