"""Case test R05: short and long factors, below, at and above the length where they change."""

from collections.abc import Callable
from typing import Any

import pytest

from chunkcache.planning import AskOptions

Caches = Callable[..., Any]
Benches = Callable[..., Any]
LibraryAnswer = Callable[[Any, tuple[int, ...], int], tuple[int, ...]]


def _longrope(original_length: int, length: int = 256) -> dict[str, Any]:
    return {
        "max_position_embeddings": length,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "factor": length / original_length,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [2.0 + 0.7 * i for i in range(8)],
            "original_max_position_embeddings": original_length,
        },
    }


def _assert_layer_0_is_exact(bench: Any, run: Any) -> None:
    k, v = bench.plain_kv(run.layout.token_ids)
    assert (run.k[0] - k[0]).abs().max() <= 1e-5
    assert (run.v[0] - v[0]).abs().max() <= 1e-5


def _assert_exact(bench: Any, run: Any) -> None:
    plain = bench.plain_logits(run.layout.token_ids)[-1]
    assert (run.outcome.logits - plain).abs().max() <= 1e-4


@pytest.mark.parametrize("lengths", [(40, 40), (5, 4)])
@pytest.mark.parametrize("preparation", ["alone", "sink(4)"])
def test_R05_short_and_long_factors(
    bench_of: Benches, lengths: tuple[int, int], preparation: str
) -> None:
    """Chunks cached under the short factors stand under those of the assembled length."""
    bench = bench_of("llama", **_longrope(64))
    chunks = [bench.draw(n, n) for n in lengths]
    run = bench.run(bench.plan(chunks, "none", preparation=preparation))
    assert (run.layout.num_tokens > 64) == (sum(lengths) > 64)
    _assert_layer_0_is_exact(bench, run)
    _assert_exact(bench, bench.run(bench.plan(chunks, "full")))


def test_R05_an_answer_that_crosses_the_switch(
    open_cache: Caches, model_dir: Any, library_answer: LibraryAnswer
) -> None:
    """An exact answer equals the library's where the factors change in the middle of it."""
    text, question = "The light goes on at dusk.", "When?"
    probe = open_cache("probe")
    probe.put("note", text)
    num_prompt = probe.plan(question, ["note"], AskOptions()).layout.num_tokens
    cache = open_cache(model=model_dir(**_longrope(num_prompt + 4)))
    cache.put("note", text)
    stream = cache.stream(question, ["note"], AskOptions(policy="full", max_tokens=12))
    answer = stream.answer()
    assert len(answer.token_ids) == 12
    assert library_answer(cache, stream.plan.layout.token_ids, 12) == answer.token_ids


@pytest.mark.parametrize("policy", ["full", "none"])
def test_R05_an_answer_that_crosses_the_switch_of_phi3(
    open_cache: Caches, model_dir: Any, policy: str, library_answer: LibraryAnswer
) -> None:
    """Phi-3 runs everything again at the switch, as its library does, and the answer says so.

    1. The library's own answer from the tokens in front of the switch.
    2. Ours, whatever was reused for the prompt.
    """
    text, question = "The light goes on at dusk.", "When?"
    probe = open_cache("probe")
    probe.put("note", text)
    num_prompt = probe.plan(question, ["note"], AskOptions()).layout.num_tokens
    config = _longrope(num_prompt + 4)
    rope = config["rope_parameters"]
    rope |= {name: rope[name][:4] for name in ("short_factor", "long_factor")}
    rope["partial_rotary_factor"] = 0.5
    original = rope["original_max_position_embeddings"]
    cache = open_cache(model=model_dir("phi3", original_max_position_embeddings=original, **config))
    cache.put("note", text)
    stream = cache.stream(question, ["note"], AskOptions(policy=policy, max_tokens=12))
    others = [cache.stream("Who?", ["note"], AskOptions(max_tokens=20)) for _ in range(3)]
    answer = stream.answer()
    beside = {o.answer().token_ids for o in others}
    alone = cache.stream("Who?", ["note"], AskOptions(max_tokens=20)).answer()
    assert beside == {alone.token_ids}, "an answer depends on its company"
    assert [w.code for w in answer.report.warnings] == ["rotation_switched"]
    prompt = stream.plan.layout.token_ids
    if policy == "full":
        assert library_answer(cache, prompt, 12) == answer.token_ids
    front = (*prompt, *answer.token_ids[:5])
    assert len(front) == original + 1
    assert library_answer(cache, front, 7) == answer.token_ids[5:]
