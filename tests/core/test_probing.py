"""The fidelity probe: figures that can be checked, kept under what they depend on."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chunkcache import AskOptions
from chunkcache.engine.request import GenerationJob
from chunkcache.engine.sampling import SamplingParams
from chunkcache.errors import ContextLengthExceededError
from chunkcache.fusion.place import place_entry
from chunkcache.probe_set import ProbeSet, built_in_probe_set
from chunkcache.probing import FidelityReport, measure_fidelity, stored_fidelity
from chunkcache.store.reports import load_report

QUESTIONS = ("Who keeps the key?", "When was the bridge built?")


@pytest.fixture
def probes(passages: dict[str, str]) -> ProbeSet:
    return ProbeSet(passages, QUESTIONS)


def test_the_built_in_set_is_large_enough_to_be_fused() -> None:
    probes = built_in_probe_set()
    assert 4 <= len(probes.questions) <= 6
    assert 8 <= len(probes.passages) <= 10
    words = [len(text.split()) for text in probes.passages.values()]
    assert all(90 <= n <= 150 for n in words), words
    orders = {probes.passages_for(i) for i in range(len(probes.questions))}
    assert len(orders) == len(probes.questions)
    assert all(dict(order) == probes.passages for order in orders)


def test_figures_are_those_of_answers_over_the_same_prompts(
    open_cache: Callable[..., Any], model_dir: Callable[..., Any], probes: ProbeSet
) -> None:
    cache = open_cache(policy="none", model=model_dir(max_position_embeddings=2048))
    report = measure_fidelity(cache.runtime, probes=probes)
    for name, text in probes.passages.items():
        cache.put(name, text)
    answers = [
        cache.answer(q, [n for n, _ in probes.passages_for(i)], compare=True, max_tokens=8)
        for i, q in enumerate(QUESTIONS)
    ]
    found = [a.verification for a in answers]
    assert report.num_questions == 2
    assert report.mean_kl == pytest.approx(sum(v.mean_kl for v in found) / 2)
    assert report.mean_kl > 0
    assert report.worst_kl == pytest.approx(max(v.mean_kl for v in found))
    assert report.kl_first == pytest.approx(sum(v.kl_first for v in found) / 2)
    assert report.agreement == pytest.approx(sum(v.agreement for v in found) / 2)
    charged = sum(a.report.charged_ratio for a in answers) / 2
    assert report.charged_ratio == pytest.approx(charged)
    assert (report.policy, report.preparation, report.codec) == ("none", "alone", "bf16")


def test_nothing_but_the_figures_is_kept(
    open_cache: Callable[..., Any], probes: ProbeSet, passages: dict[str, str]
) -> None:
    cache = open_cache()
    cache.put("tower", passages["tower"])
    before = cache.runtime.stack.stats()
    lines: list[str] = []
    report = measure_fidelity(cache.runtime, lines.append, probes)
    assert len(lines) == 2
    assert "1 of 2" in lines[0]
    assert cache.runtime.stack.stats() == before
    assert [d.document_id for d in cache.list()] == ["tower"]
    assert cache.runtime.meter.stats().outcomes == {}
    assert cache.runtime.pool.num_free_pages == cache.runtime.pool.num_pages
    assert stored_fidelity(cache.runtime) is None, "figures of another set do not count"
    kept = load_report(cache.runtime.env, "fidelity", report.fingerprint, FidelityReport)
    assert kept == report
    assert measure_fidelity(cache.runtime, probes=probes) == report, "the same again"


@pytest.mark.parametrize(
    "changed",
    [
        {"policy": "query"},
        {"recompute_ratio": 0.3},
        {"preparation": "sink(4)"},
        {"codec": "raw"},
        {"chunk_tokens": 32},
        {"system": "Be brief."},
    ],
)
def test_figures_are_of_the_settings_they_were_measured_with(
    open_cache: Callable[..., Any], probes: ProbeSet, changed: dict[str, Any]
) -> None:
    first = open_cache("one").runtime
    report = measure_fidelity(first, probes=probes)
    other = open_cache("two", **changed).runtime
    assert measure_fidelity(other, probes=probes).fingerprint != report.fingerprint
    same = open_cache("three", min_fused_context_tokens=9_999, max_queued_requests=3).runtime
    assert measure_fidelity(same, probes=probes) == report, "what does not matter does not"


def test_a_model_that_is_served_in_full_alone_is_measured_so(
    open_cache: Callable[..., Any], probes: ProbeSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backwards(sequence: Any, entry: Any, start: int) -> None:
        place_entry(sequence, entry, start)
        sequence.k_pages.neg_()

    monkeypatch.setattr("chunkcache.model.gate.place_entry", backwards)
    cache = open_cache()
    assert cache.runtime.gate.full_only
    report = measure_fidelity(cache.runtime, probes=probes)
    assert (report.policy, report.closeness) == ("full", "exact")


def test_requests_go_on_meanwhile(
    open_cache: Callable[..., Any], probes: ProbeSet, passages: dict[str, str]
) -> None:
    cache = open_cache()
    cache.put("tower", passages["tower"])
    expected = cache.answer(QUESTIONS[0], ["tower"], max_tokens=6).token_ids
    plan = cache.plan(QUESTIONS[0], ["tower"], AskOptions())
    ends: list[Any] = []

    def ask(line: str) -> None:
        job = GenerationJob(plan, SamplingParams(), 6)
        ends.append(cache.runtime.engine.submit(job).result().token_ids)

    measure_fidelity(cache.runtime, ask, probes)
    assert ends == [expected] * 2


def test_a_model_without_room_is_refused_with_both_numbers(
    open_cache: Callable[..., Any],
) -> None:
    cache = open_cache()
    limit = cache.runtime.model.runner.spec.max_positions
    with pytest.raises(ContextLengthExceededError, match=str(limit)):
        measure_fidelity(cache.runtime)
    assert stored_fidelity(cache.runtime) is None


@pytest.mark.parametrize(
    ("mean_kl", "word"),
    [(0.0, "exact"), (0.004, "very_close"), (0.02, "close"), (0.1, "loose"), (0.7, "far")],
)
def test_figures_have_a_word(mean_kl: float, word: str) -> None:
    report = FidelityReport(
        model_name="m",
        policy="none",
        preparation="alone",
        codec="raw",
        num_questions=1,
        num_context_tokens=1,
        compared_tokens=8,
        kl_first=mean_kl,
        mean_kl=mean_kl,
        worst_kl=mean_kl,
        agreement=1.0,
        charged_ratio=0.1,
        fingerprint="0",
    )
    assert report.closeness == word


def test_figures_are_of_the_template_they_were_measured_with(
    open_cache: Callable[..., Any],
    model_dir: Callable[..., Path],
    probes: ProbeSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("chunkcache.probing.built_in_probe_set", lambda: probes)
    model = Path(shutil.copytree(model_dir(max_position_embeddings=2048), tmp_path / "served"))
    cache = open_cache(model=model)
    report = measure_fidelity(cache.runtime)
    assert stored_fidelity(cache.runtime) == report
    path = model / "tokenizer_config.json"
    path.write_text(path.read_text().replace("<|im_end|>'", "<|im_end|> '"))
    assert cache.reload_model().changed
    assert stored_fidelity(cache.runtime) is None
