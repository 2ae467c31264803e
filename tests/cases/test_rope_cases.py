"""Case tests, area R: keys stand at the position they are used at, whatever the rotation."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkcache.entry import Entry
from chunkcache.errors import (
    ContextLengthExceededError,
    InvalidValueError,
    UnsupportedModelError,
)
from chunkcache.fusion.place import place_entry
from chunkcache.fusion.recompute import SequenceKV
from chunkcache.identity import EntryIdentity
from chunkcache.planning import AskOptions

Caches = Callable[..., Any]
Benches = Callable[..., Any]
LibraryAnswer = Callable[[Any, tuple[int, ...], int], tuple[int, ...]]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def _assert_layer_0_is_exact(bench: Any, run: Any, tolerance: float = 1e-5) -> None:
    k, v = bench.plain_kv(run.layout.token_ids)
    assert (run.k[0] - k[0]).abs().max() <= tolerance
    assert (run.v[0] - v[0]).abs().max() <= tolerance


def _assert_exact(bench: Any, run: Any) -> None:
    plain = bench.plain_logits(run.layout.token_ids)[-1]
    assert (run.outcome.logits - plain).abs().max() <= 1e-4


@settings(max_examples=10, deadline=None)
@given(offset=st.integers(0, 150), length=st.integers(1, 40))
def test_R01_scaled_rotation_at_any_offset(bench_of: Benches, offset: int, length: int) -> None:
    """With llama3 scaling a reused chunk's layer 0 is exact wherever it stands, and is reused."""
    bench = bench_of("llama", rope_parameters=LLAMA3)
    front = [bench.draw(offset, 1)] if offset else []
    run = bench.run(bench.plan([*front, bench.draw(length, 2)], "none"))
    _assert_layer_0_is_exact(bench, run)
    assert run.outcome.report.policy == "none"
    assert not run.outcome.report.warnings


def test_R02_partial_rotary_is_refused(open_cache: Caches, change_model: Any) -> None:
    """A Llama said to rotate half of each head does not start; the message says why.

    Its library has no such form. Phi-3, which has one, is in ``tests/model/test_family_matrix.py``.
    """
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    model = change_model("partial", config=lambda config: config.update(rope_parameters=rope))
    with pytest.raises(UnsupportedModelError, match="partial rotary"):
        open_cache(model=model)


@pytest.mark.parametrize("model_type", ["gptj", "gpt_neox", "bloom", "mamba", "deepseek_v3"])
def test_R02_families_rotated_otherwise_are_refused(
    open_cache: Caches, tmp_path: Path, model_type: str
) -> None:
    """Interleaved pairs, biases, latent and recurrent layers: refused before weights are read."""
    from transformers import AutoConfig

    model = tmp_path / model_type
    AutoConfig.for_model(model_type).save_pretrained(model)
    with pytest.raises(UnsupportedModelError, match=model_type):
        open_cache(model=model)


@pytest.mark.parametrize("fault", ["offset", "interleaved"])
def test_R02_a_failed_self_test_never_serves_reused_chunks(
    open_cache: Caches, passages: dict[str, str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Keys rotated for another position, or in another convention, leave the full prefill alone."""

    def place_wrongly(sequence: SequenceKV, entry: Entry, start: int) -> None:
        if fault == "offset":
            late = sequence.rotary.take(torch.arange(len(sequence.keys)).roll(1))
            place_entry(replace(sequence, rotary=late), entry, start)
            return
        halves = entry.k.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        place_entry(sequence, Entry(entry.identity, entry.key, halves.contiguous(), entry.v), start)

    with monkeypatch.context() as patched:
        patched.setattr("chunkcache.model.gate.place_entry", place_wrongly)
        lines: list[str] = []
        open_cache(progress=lines.append).close()
        assert any("full prefills alone" in line for line in lines)
    cache = open_cache()
    gate = cache.runtime.gate
    assert (gate.passed, gate.full_only) == (False, True)
    assert max(gate.layer0_difference, gate.rotation_difference) > gate.tolerance
    for name, text in passages.items():
        cache.put(name, text)
    for policy in ("hybrid", "none"):
        answer = cache.answer("Where?", list(passages), policy=policy, max_tokens=2)
        assert answer.report.policy == "full"
        assert answer.report.exact
        assert [w.code for w in answer.report.warnings] == ["model_full_only"]
        assert answer.report.account.cached_tokens == 0
    another = open_cache("another-store").runtime.gate
    assert (another.passed, another.full_only) == (True, False)


@pytest.mark.parametrize("lengths", [(40, 40), (10, 20), (90, 3, 60)])
def test_R04_rotation_that_depends_on_the_length(
    bench_of: Benches, lengths: tuple[int, ...]
) -> None:
    """Chunks cached at a short length stand at the base of the assembled length."""
    bench = bench_of("llama", max_position_embeddings=64, rope_parameters=DYNAMIC)
    chunks = [bench.draw(n, n) for n in lengths]
    question = bench.draw(20, 9)
    run = bench.run(bench.plan(chunks, "none", question=question))
    assert run.layout.num_tokens > 64
    _assert_layer_0_is_exact(bench, run)
    _assert_exact(bench, bench.run(bench.plan(chunks, "full", question=question)))


@pytest.mark.parametrize("codec", ["q8_0", "int4", "raw16", ""])
def test_R08_storage_that_is_not_offered_is_refused(open_cache: Caches, codec: str) -> None:
    """Asking for it fails at start, by name; the same for a form that values could overflow."""
    with pytest.raises(InvalidValueError) as caught:
        open_cache(codec=codec)
    assert caught.value.param == "codec"


@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.parametrize("offset", [0, 200])
@torch.inference_mode()
def test_R08_quantised_keys_are_dequantised_before_they_are_rotated(
    bench_of: Benches, codec: str, offset: int
) -> None:
    """A quantised entry placed at 200 is the exact one placed there, up to half a step.

    1. Quantised, placed; and exact, placed, by the product.
    2. The step of each channel, from the exact keys: rotation mixes two of them, so an error is at
       most the two half steps together.
    """
    bench = bench_of("llama")
    placed = {}
    plan = bench.plan([bench.draw(90, 1)], "none")
    for name in ("raw32", codec):
        identity = replace(plan.identities[0], codec=name)
        entry = bench.prefill.compute(identity, _codec(name))
        pages = bench.pool.allocate(offset + 90)
        assert pages is not None
        with pages:
            sequence = SequenceKV.over(bench.runner, bench.pool.k, bench.pool.v, pages.slots)
            place_entry(sequence, entry, offset)
            where = pages.slots[offset : offset + 90]
            placed[name] = [p.flatten(1, 2)[:, where].clone() for p in (bench.pool.k, bench.pool.v)]
        if name == "raw32":
            peaks = torch.cat([g.abs().amax(1, keepdim=True) for g in entry.k.split(64, 1)], dim=1)
            exact_v = entry.v
    relative = {"int8": 1 / 254, "fp8": 1 / 16}[codec] * 1.001
    half_step = peaks.repeat_interleave(64, dim=1)[:, :90] * relative
    both = half_step + half_step.roll(half_step.shape[-1] // 2, dims=-1)
    (exact, _), (found, values) = placed["raw32"], placed[codec]
    assert ((found - exact).abs() <= both + 1e-6).all()
    assert ((values - exact_v).abs() <= exact_v.abs().amax(-1, keepdim=True) * relative).all()
    assert not torch.equal(found, exact)


@torch.inference_mode()
def test_R09_angles_are_precise_at_long_positions(
    load_tiny: Callable[..., Any], model_dir: Any, cache_dir: Path
) -> None:
    """In a bf16 model keys are rotated by angles of fp32 precision.

    1. A unit key placed at a far position by the product, in bf16.
    2. The same key rotated in fp64.
    """
    from chunkcache.model.loading import load_model

    folder = model_dir(head_dim=128, max_position_embeddings=8192)
    runner = load_model(str(folder), cache_dir=cache_dir, dtype="bfloat16").runner
    assert runner.dtype == torch.bfloat16
    spec = runner.spec
    generator = torch.Generator().manual_seed(0)
    shape = (spec.num_layers, 1, spec.num_kv_heads, 128)
    key = torch.randn(shape, generator=generator)
    key = (key / key.norm(dim=-1, keepdim=True)).bfloat16()
    identity = EntryIdentity(runner.digest, b"n", "alone", (), "bf16", (5,))  # type: ignore[arg-type]
    entry = Entry(identity, identity.key(), key, key)
    frequencies = 10000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    a, b = key.double().chunk(2, dim=-1)
    for position in (1, 257, 1857, 4095, 8191):
        pages = torch.zeros(spec.num_layers, 1, 8192, spec.num_kv_heads, 128, dtype=torch.bfloat16)
        sequence = SequenceKV.over(runner, pages, pages.clone(), torch.arange(8192))
        place_entry(sequence, entry, position)
        angle = position * frequencies
        cos, sin = angle.cos(), angle.sin()
        expected = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        placed = sequence.k_pages[:, 0, position].unsqueeze(1).double()
        assert (placed - expected).abs().max() <= 2**-9
    tables = runner.rotary.tables(8192)
    assert tables.cos.dtype == torch.float32
    phases = torch.cat([tables.cos[0], tables.sin[0]], dim=-1)
    assert len(torch.unique(phases, dim=0)) == 8192


def test_R10_an_entry_is_rotated_from_the_same_bits_each_time(
    open_cache: Caches, passages: dict[str, str], entry_bytes: Any
) -> None:
    """A chunk used at many offsets: stored bytes never change, equal prompts give equal bits."""
    cache = open_cache()
    for name, text in passages.items():
        cache.put(name, text)
    before = entry_bytes(cache)
    a, b, c = passages
    orders = [[a], [b, a], [c, a], [a], [c, b, a], [b, a], [a, a, a], [a]]
    seen: dict[str, Any] = {}
    for order in orders:
        done = cache.stream("Where?", order, AskOptions(policy="none", max_tokens=2)).finished()
        earlier = seen.setdefault(str(order), done)
        assert torch.equal(earlier.first_logits, done.first_logits)
    assert entry_bytes(cache) == before


@settings(max_examples=5, deadline=None)
@given(offsets=st.lists(st.integers(0, 500), min_size=2, max_size=6))
@torch.inference_mode()
def test_R10_placing_leaves_the_entry_as_it_is(bench_of: Benches, offsets: list[int]) -> None:
    """Placed anywhere in between, an entry gives the same keys at 0, and keeps its own."""
    bench = bench_of("llama")
    plan = bench.plan([bench.draw(9, 1)], "none")
    codec_entry = bench.prefill.compute(plan.identities[0], _codec("raw32"))
    kept = codec_entry.k.clone(), codec_entry.v.clone()
    placed = []
    for offset in [0, *offsets, 0]:
        pages = bench.pool.allocate(offset + 9)
        assert pages is not None
        with pages:
            sequence = SequenceKV.over(bench.runner, bench.pool.k, bench.pool.v, pages.slots)
            place_entry(sequence, codec_entry, offset)
            if offset == 0:
                placed.append(bench.pool.k.flatten(1, 2)[:, pages.slots].clone())
    assert torch.equal(codec_entry.k, kept[0])
    assert torch.equal(codec_entry.v, kept[1])
    assert all(torch.equal(k, placed[0]) for k in placed)


def _codec(name: str) -> Any:
    from chunkcache.codecs import codec_by_name

    return codec_by_name(name, torch.float32)


def _question_for(cache: Any, num_prompt_tokens: int) -> str:
    """A question that makes the prompt over ``note`` exactly so long."""
    short = cache.plan("z", ["note"], AskOptions()).layout.num_tokens
    question = "z" * (num_prompt_tokens - short + 1)
    tokenizer = cache.runtime.model.tokenizer
    assert tokenizer.count_content(question) == len(question)
    return question


def test_R11_the_last_position_of_the_context(
    open_cache: Caches, model_dir: Any, library_answer: LibraryAnswer
) -> None:
    """A prompt may fill all positions but one; longer ones are refused before any work.

    Documented: the prompt and at least one answer token must fit, answers are cut to what is left.
    """
    limit = 160
    cache = open_cache(model=model_dir(max_position_embeddings=limit))
    cache.put("note", "The light goes on at dusk.")
    lookups = cache.runtime.stack.stats().lookups

    for num_prompt, max_tokens in ((limit, 1), (limit + 88, 1), (4 * limit, 64)):
        small = open_cache(f"measure-{num_prompt}")
        small.put("note", "The light goes on at dusk.")
        question = _question_for(small, num_prompt)
        with pytest.raises(ContextLengthExceededError) as caught:
            cache.answer(question, ["note"], max_tokens=max_tokens)
        assert str(limit) in caught.value.message
        assert str(num_prompt) in caught.value.message
        assert caught.value.status == 400
    assert cache.runtime.stack.stats().lookups == lookups

    for policy in ("none", "full"):
        stream = cache.stream(
            _question_for(cache, limit - 1), ["note"], AskOptions(policy=policy, max_tokens=1)
        )
        answer = stream.answer()
        assert stream.plan.layout.num_tokens == limit - 1
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", 1)
    assert library_answer(cache, stream.plan.layout.token_ids, 1) == answer.token_ids

    stream = cache.stream(
        _question_for(cache, limit - 12), ["note"], AskOptions(policy="full", max_tokens=64)
    )
    clipped = stream.answer()
    assert (clipped.finish_reason, len(clipped.token_ids)) == ("length", 12)
    assert library_answer(cache, stream.plan.layout.token_ids, 12) == clipped.token_ids


@pytest.mark.parametrize("policy", ["full", "hybrid"])
@pytest.mark.parametrize("lengths", [(100, 80), (3, 1, 17)])
def test_R12_question_rows_know_their_positions(
    bench_of: Benches, policy: str, lengths: tuple[int, ...]
) -> None:
    """Behind assembled chunks the question continues the positions and sees everything before it.

    1. Keys and values of every layer, and the logits, of a plain forward.
    2. Those of the assembled prompt with every chunk token recomputed.
    """
    bench = bench_of("llama")
    options = {"recompute_ratio": 1.0} if policy == "hybrid" else {}
    chunks = [bench.draw(n, n) for n in lengths]
    run = bench.run(bench.plan(chunks, policy, question=bench.draw(7, 9), **options))
    positions = [p for s in run.layout.segments for p in range(s.start, s.end)]
    assert positions == list(range(run.layout.num_tokens))
    (question,) = (s for s in run.layout.segments if s.kind == "query")
    before = sum(len(s.token_ids) for s in run.layout.segments if s.start < question.start)
    assert (question.start, question.end) == (before, before + 7)
    k, v = bench.plain_kv(run.layout.token_ids)
    assert (run.k - k).abs().max() <= 1e-4
    assert (run.v - v).abs().max() <= 1e-4
    _assert_exact(bench, run)


def test_R13_answers_of_unequal_length_side_by_side(
    open_cache: Caches, passages: dict[str, str], library_answer: LibraryAnswer
) -> None:
    """A short and a long prompt that are decoded together answer as each does alone."""
    cache = open_cache()
    for name, text in passages.items():
        cache.put(name, text)
    requests = [("Why?", []), ("Who keeps the key?", list(passages)), ("z", ["tower"])]
    options = AskOptions(policy="full", max_tokens=20)
    solo = [cache.stream(q, names, options).finished().token_ids for q, names in requests]
    streams = [cache.stream(q, names, options) for q, names in requests]
    together = [s.finished().token_ids for s in streams]
    assert together == solo
    lengths = [s.plan.layout.num_tokens for s in streams]
    assert max(lengths) > 3 * min(lengths)
    for stream, token_ids in zip(streams, together, strict=True):
        assert library_answer(cache, stream.plan.layout.token_ids, 20) == token_ids
