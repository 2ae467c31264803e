"""Case tests, area N: an answer is a function of the request, and nothing that is not a number stays."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from chunkcache.engine.sampling import SamplingParams
from chunkcache.model.prefill import IsolatedPrefill
from chunkcache.planning import AskOptions
from chunkcache.store.transaction import Database

Caches = Callable[..., Any]
Passages = dict[str, str]


def _fill(cache: Any, passages: Passages) -> list[str]:
    for name, text in passages.items():
        cache.put(name, text)
    return list(passages)


@pytest.mark.parametrize("tile_rows", [1, 4, 8])
def test_N01_company_changes_nothing(
    open_cache: Caches, passages: Passages, tile_rows: int
) -> None:
    """A request answers the same, to the bit of its first logits, alone and among seven others."""
    cache = open_cache(decode_tile_rows=tile_rows)
    names = _fill(cache, passages)
    mine = AskOptions(max_tokens=15)
    alone = cache.stream("Who keeps the key?", names, mine).finished()
    streams = []
    for index in range(8):
        if index == 4:
            streams.append(cache.stream("Who keeps the key?", names, mine))
        options = AskOptions(
            policy=("full", "none", "deviation")[index % 3],
            max_tokens=1 + 4 * index,
            sampling=SamplingParams(temperature=0.1 * index, seed=index),
        )
        streams.append(cache.stream(f"{index}?", names[: index % 4], options))
    company = [stream.finished() for stream in streams][4]
    assert company.token_ids == alone.token_ids
    assert torch.equal(company.first_logits, alone.first_logits)


def test_N02_recomputing_all_is_the_answer_without_a_cache(
    open_cache: Caches, passages: Passages
) -> None:
    """Over many prompts: exact mode, full mode and the library agree in logits and tokens."""
    cache = open_cache()
    names = _fill(cache, passages)
    model = cache.runtime.model.runner.hf_model
    for index in range(10):
        some = [names[(index + i) % 3] for i in range(1 + index % 3)]
        question = f"Question {index}: what is {'kept ' * (index % 4)}there?"
        modes = {
            "exact": {"policy": "hybrid", "recompute_ratio": 1.0},
            "full": {"policy": "full"},
        }
        for mode in modes.values():
            ratio = mode.pop("recompute_ratio", None)
            options = AskOptions(max_tokens=6, policy=mode["policy"])
            if ratio is not None:
                given = replace(options.policy_options, recompute_ratio=ratio)
                options = replace(options, policy_options=given)
            stream = cache.stream(question, some, options)
            done = stream.finished()
            ids = torch.tensor([stream.plan.layout.token_ids])
            with torch.inference_mode():
                plain = model(input_ids=ids, use_cache=False).logits[0, -1].float()
            assert (done.first_logits - plain).abs().max() <= 1e-4
            generated = model.generate(
                ids,
                max_new_tokens=6,
                do_sample=False,
                pad_token_id=0,
                attention_mask=torch.ones_like(ids),
            )
            assert tuple(generated[0, ids.shape[1] :].tolist()) == done.token_ids


def test_N02_half_precision_stays_within_its_bound(
    make_bench: Any, model_dir: Any, cache_dir: Any
) -> None:
    """In bf16 a full recompute differs from the plain forward by no more than the gate allows."""
    from chunkcache.model.gate import run_gate
    from chunkcache.model.loading import load_model

    model = load_model(str(model_dir()), cache_dir=cache_dir, dtype="bfloat16")
    report = run_gate(model.runner)
    assert report.passed
    assert report.tolerance <= 0.06
    bench = make_bench(model)
    run = bench.run(bench.plan([bench.draw(60, 1), bench.draw(30, 2)], "full"))
    plain = bench.plain_logits(run.layout.token_ids)[-1]
    difference = (run.outcome.logits - plain).abs().max() / max(1.0, float(plain.abs().max()))
    assert difference <= report.tolerance


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", ["k", "v"])
def test_N03_values_that_are_no_numbers_are_not_kept(
    open_cache: Caches,
    passages: Passages,
    monkeypatch: pytest.MonkeyPatch,
    entry_bytes: Any,
    value: float,
    where: str,
) -> None:
    """A prefill that overflowed is refused and reported; questions run the chunk in place instead."""
    cache = open_cache()
    expected = None
    steps = IsolatedPrefill.steps

    def overflow(self: IsolatedPrefill, *arguments: Any) -> Any:
        entries = yield from steps(self, *arguments)
        for entry in entries:
            getattr(entry, where)[-1, 0, 0, 0] = value
        return entries

    monkeypatch.setattr(IsolatedPrefill, "steps", overflow)
    result = cache.put("tower", passages["tower"])
    assert result.refused_chunks == result.num_chunks
    assert not entry_bytes(cache)
    for _ in range(2):
        answer = cache.answer("Who?", ["tower"], policy="none", max_tokens=6)
        assert {w.code for w in answer.report.warnings} == {"entry_non_finite"}
        assert answer.report.account.cached_tokens == 0
        expected = expected or cache.answer("Who?", ["tower"], policy="full", max_tokens=6)
        assert answer.token_ids == expected.token_ids
    assert cache.runtime.stack.stats().not_stored["non_finite"] >= result.num_chunks
    monkeypatch.undo()
    assert cache.answer("Who?", ["tower"], policy="none").report.account.cache_write_tokens
    assert len(entry_bytes(cache)) == result.num_chunks
    with cache.runtime.env.read() as txn:
        assert txn.num_entries(Database.QUARANTINE) == 0


def test_N03_a_cast_that_overflows(open_cache: Caches, passages: Passages) -> None:
    """Keys that fit the computation but not the stored form are refused at start, or kept whole."""
    cache = open_cache(codec="bf16")
    runner = cache.runtime.model.runner
    with torch.no_grad():
        runner.hf_model.model.layers[1].self_attn.k_proj.weight.mul_(1e6)
    result = cache.put("tower", passages["tower"])
    assert result.refused_chunks == 0
    for identity in cache.plan("", ["tower"], AskOptions()).identities:
        with cache.runtime.stack.load(identity) as lease:
            assert lease.entry.is_finite()
            assert lease.entry.k.abs().max() > 70_000


def test_N05_fifty_repeats(open_cache: Caches, passages: Passages) -> None:
    """One request, fifty times, with others between that move pages and evict entries: one answer."""
    cache = open_cache(host_tier_bytes=30_000, pool_tokens=1024, decode_tile_rows=2)
    names = _fill(cache, passages)
    options = AskOptions(max_tokens=8)
    first = cache.stream("When was it built?", names, options).finished()
    for index in range(50):
        others = []
        if index % 5 == 0:
            others = [
                cache.stream(
                    "x" * (1 + index), names[::-1][: 1 + index % 3], AskOptions(max_tokens=20)
                )
                for _ in range(2)
            ]
        again = cache.stream("When was it built?", names, options).finished()
        assert again.token_ids == first.token_ids
        assert torch.equal(again.first_logits, first.first_logits)
        for other in others:
            other.finished()
    assert cache.runtime.stack.stats().evictions > 0
