"""Reloading the model: no moment at which anything old answers for the new weights."""

import json
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from chunkcache import model_opening
from chunkcache.chunk_cache import ChunkCache
from chunkcache.entry import Entry
from chunkcache.errors import (
    DrainingError,
    GateFailedError,
    InvalidValueError,
    ModelError,
    ReloadInProgressError,
)
from chunkcache.model.gate import GateReport, run_gate
from chunkcache.planning import AskOptions
from chunkcache.testing import write_tiny_adapter, write_tiny_model

QUESTION = "Who keeps the key to the tower?"


@pytest.fixture
def model(model_dir: Callable[..., Path], tmp_path: Path) -> Path:
    """A model directory of the test's own."""
    return Path(shutil.copytree(model_dir(), tmp_path / "served"))


def _change(model: Path, seed: int = 1) -> None:
    """New weights, written over the old file in place."""
    path = model / "model.safetensors"
    tensors = {n: t.clone() for n, t in load_file(path).items()}
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if "v_proj" in name:
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, path, metadata={"format": "pt"})


def _fill(cache: ChunkCache, passages: dict[str, str]) -> list[str]:
    for name, text in passages.items():
        cache.put(name, text)
    return list(passages)


def _sources(answer: Any) -> set[str]:
    return {d.source for d in answer.report.documents}


def test_new_weights_miss_in_every_tier_and_answer_as_if_alone(
    open_cache: Callable[..., ChunkCache], model: Path, passages: dict[str, str]
) -> None:
    cache = open_cache(model=model)
    names = _fill(cache, passages)
    before = cache.answer(QUESTION, names)
    old = cache.plan(QUESTION, names, AskOptions()).identities
    stored = cache.runtime.stack.stats()
    _change(model)
    result = cache.reload_model()
    assert result.changed
    assert result.previous_digest == old[0].model.hex()
    assert result.digest == cache.runtime.model.runner.digest.hex()
    assert result.dropped_entries == len(old)
    assert cache.runtime.stack.stats().entries == {"host": 0, "disk": stored.entries["disk"]}
    new = cache.plan(QUESTION, names, AskOptions()).identities
    assert {i.key() for i in old}.isdisjoint(i.key() for i in new)
    met = cache.answer(QUESTION, names)
    assert _sources(met) == {"computed"}
    assert met.report.account.cached_tokens == 0
    cold = open_cache("empty-store", model=model)
    _fill(cold, passages)
    assert cold.answer(QUESTION, names).token_ids == met.token_ids
    assert before.token_ids != met.token_ids


def test_the_old_weights_find_their_entries_again(
    open_cache: Callable[..., ChunkCache], model: Path, passages: dict[str, str]
) -> None:
    cache = open_cache(model=model)
    names = _fill(cache, passages)
    first = cache.answer(QUESTION, names)
    kept = (model / "model.safetensors").read_bytes()
    _change(model)
    cache.reload_model()
    (model / "model.safetensors").write_bytes(kept)
    cache.reload_model()
    again = cache.answer(QUESTION, names)
    assert _sources(again) == {"disk"}
    assert again.token_ids == first.token_ids


def test_pins_end_and_speeds_are_measured_anew(
    open_cache: Callable[..., ChunkCache], model: Path, passages: dict[str, str]
) -> None:
    cache = open_cache(model=model)
    names = _fill(cache, passages)
    cache.pin(names, ttl_s=600)
    pins_of_old = cache._current().pins
    speed = cache.runtime.load_speed
    for _ in range(100):
        speed.note_prefill(1, 1e6)
    assert speed.figures().prefill_s_per_row > 1e5
    _change(model)
    cache.reload_model()
    assert cache.runtime.stack.stats().pinned_bytes == 0
    assert cache.runtime.load_speed.figures().prefill_s_per_row < 1e5
    with pytest.raises(DrainingError):
        pins_of_old.pin(names, 600)
    assert cache.runtime.stack.stats().pinned_bytes == 0
    assert cache.pin(names, ttl_s=600).num_chunks > 0
    assert cache.runtime.stack.stats().pinned_bytes > 0


def test_files_that_did_not_change_change_nothing(
    open_cache: Callable[..., ChunkCache], model: Path, passages: dict[str, str]
) -> None:
    cache = open_cache(model=model)
    _fill(cache, passages)
    runtime, lines = cache.runtime, []
    result = cache.reload_model(lines.append)
    assert not result.changed
    assert result.digest == result.previous_digest
    assert cache.runtime is runtime
    assert lines[-1] == "the model has not changed"
    assert cache.runtime.stack.stats().entries["host"] > 0


def test_a_changed_template_is_a_change(open_cache: Callable[..., ChunkCache], model: Path) -> None:
    cache = open_cache(model=model)
    config = (model / "tokenizer_config.json").read_text()
    (model / "tokenizer_config.json").write_text(config.replace("<|im_end|>'", "<|im_end|> '"))
    assert cache.reload_model().changed


def test_another_tokenizer_cuts_documents_again(
    open_cache: Callable[..., ChunkCache], model: Path, passages: dict[str, str]
) -> None:
    cache = open_cache(model=model)
    names = _fill(cache, passages)
    definition = json.loads((model / "tokenizer.json").read_text())
    definition["model"]["merges"] = definition["model"]["merges"][:-40]
    (model / "tokenizer.json").write_text(json.dumps(definition))
    assert cache.reload_model().changed
    answer = cache.answer(QUESTION, names)
    assert {w.code for w in answer.report.warnings} == {"tokenizer_changed"}
    assert _sources(answer) == {"computed"}


def test_answers_that_had_begun_are_the_old_model_s(
    open_cache: Callable[..., ChunkCache], model: Path, passages: dict[str, str]
) -> None:
    cache = open_cache(model=model)
    names = _fill(cache, passages)
    want = cache.answer(QUESTION, names, max_tokens=200)
    streams = [cache.stream(QUESTION, names, AskOptions(max_tokens=200)) for _ in range(6)]
    _change(model)
    old_engine = cache.runtime.engine
    result = cache.reload_model()
    assert result.changed
    assert {s.answer().token_ids for s in streams} == {want.token_ids}
    assert old_engine.num_open_requests == 0
    with pytest.raises(DrainingError):
        old_engine.call(lambda: None)
    assert cache.runtime.stack.stats().entries["host"] == 0


def test_every_cache_over_the_runtime_follows(
    open_cache: Callable[..., ChunkCache], model: Path, passages: dict[str, str]
) -> None:
    cache = open_cache(model=model)
    other = ChunkCache(cache.runtime, "another tenant")
    first = cache.runtime
    other.put("tower", passages["tower"])
    _change(model)
    other.reload_model()
    late = ChunkCache(first, "a third one")
    assert cache.runtime is other.runtime is late.runtime is first.current is not first
    assert _sources(other.answer(QUESTION, ["tower"])) == {"computed"}
    assert cache.runtime.meter is first.meter
    first.close()
    with pytest.raises(DrainingError):
        cache.runtime.reload()


def test_requests_all_through_a_reload_are_answered_by_one_model_or_the_other(
    open_cache: Callable[..., ChunkCache], model: Path, passages: dict[str, str]
) -> None:
    """Threads that ask and store while the model changes meet no error and no mixture."""
    cache = open_cache(model=model)
    names = _fill(cache, passages)
    old = cache.answer(QUESTION, names, policy="full", max_tokens=6).token_ids
    given: set[tuple[int, ...]] = set()
    failures: list[BaseException] = []
    is_done = threading.Event()

    def ask() -> None:
        try:
            while not is_done.is_set():
                given.add(cache.answer(QUESTION, names, policy="full", max_tokens=6).token_ids)
        except BaseException as error:
            failures.append(error)

    def store() -> None:
        try:
            for number in range(10**6):
                cache.put("late", f"Note number {number}.")
                if is_done.is_set():
                    break
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for work in (ask, ask, store)]
    for thread in threads:
        thread.start()
    _change(model)
    assert cache.reload_model().changed
    new = cache.answer(QUESTION, names, policy="full", max_tokens=6).token_ids
    is_done.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert given <= {old, new}
    assert old != new


@pytest.mark.parametrize("fault", ["truncated", "missing", "gate", "memory", "positions"])
def test_a_failed_reload_leaves_the_old_model_serving(
    open_cache: Callable[..., ChunkCache],
    model: Path,
    passages: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    cache = open_cache(model=model)
    names = _fill(cache, passages)
    before, runtime = cache.answer(QUESTION, names), cache.runtime
    path, error = model / "model.safetensors", ModelError
    whole = path.read_bytes()
    with monkeypatch.context() as patched:
        if fault == "truncated":
            path.write_bytes(whole[:-10])
        elif fault == "missing":
            path.unlink()
        elif fault == "gate":
            _change(model)
            error = GateFailedError
            report = msgspec.structs.replace(run_gate(runtime.model.runner), passed=False)
            patched.setattr(model_opening, "run_gate", lambda runner: report)
        elif fault == "memory":
            memory = type("Memory", (), {"available": 1000})
            patched.setattr("psutil.virtual_memory", lambda: memory)
        else:
            shutil.rmtree(model)
            write_tiny_model(model, max_position_embeddings=20)
            error = InvalidValueError
        with pytest.raises(error):
            cache.reload_model()
    assert cache.runtime is runtime
    again = cache.answer(QUESTION, names)
    assert again.token_ids == before.token_ids
    assert _sources(again) == {"host"}
    if fault == "truncated":
        path.write_bytes(whole)
        assert not cache.reload_model().changed


def test_two_reloads_at_once(
    open_cache: Callable[..., ChunkCache], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache(model=model)
    has_begun, may_end = threading.Event(), threading.Event()

    def slow(runner: Any) -> GateReport:
        has_begun.set()
        assert may_end.wait(30)
        return run_gate(runner)

    monkeypatch.setattr(model_opening, "run_gate", slow)
    _change(model)
    first = threading.Thread(target=cache.reload_model)
    first.start()
    assert has_begun.wait(30)
    with pytest.raises(ReloadInProgressError):
        cache.reload_model()
    may_end.set()
    first.join()


def test_an_adapter_changed_under_its_name(
    open_cache: Callable[..., ChunkCache], model: Path, passages: dict[str, str], tmp_path: Path
) -> None:
    adapter = write_tiny_adapter(tmp_path / "support", model, seed=0)
    cache = open_cache(model=model, adapter=str(adapter))
    names = _fill(cache, passages)
    first = cache.answer(QUESTION, names)
    write_tiny_adapter(adapter, model, seed=1)
    result = cache.reload_model()
    assert result.changed
    assert result.model == "served+support"
    met = cache.answer(QUESTION, names)
    assert _sources(met) == {"computed"}
    cold = open_cache("empty-store", model=model, adapter=str(adapter))
    _fill(cold, passages)
    assert cold.answer(QUESTION, names).token_ids == met.token_ids != first.token_ids


def test_an_idle_cache_keeps_no_old_model(
    open_cache: Callable[..., ChunkCache], model: Path
) -> None:
    cache = open_cache(model=model)
    idle = ChunkCache(cache.runtime, "another tenant")
    old = weakref.ref(cache.runtime.model.runner.hf_model)
    pages = weakref.ref(cache.runtime.pool)
    _change(model)
    assert cache.reload_model().changed
    assert old() is None
    assert pages() is None
    assert idle.runtime is cache.runtime


def test_no_memory_for_a_second_pool(
    open_cache: Callable[..., ChunkCache], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache(model=model)
    runtime, speed = cache.runtime, cache.runtime.load_speed
    for _ in range(100):
        speed.note_prefill(1, 1e6)

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    _change(model)
    with monkeypatch.context() as patched:
        patched.setattr("chunkcache.runtime.PagePool", fail)
        with pytest.raises(ModelError, match="no memory"):
            cache.reload_model()
    assert cache.runtime is runtime
    assert speed.figures().prefill_s_per_row > 1e5


def test_nothing_of_the_old_model_comes_back_from_disk(
    open_cache: Callable[..., ChunkCache], model: Path, passages: dict[str, str]
) -> None:
    """What a thread still does for the old model, behind the reload, needs no engine."""
    cache = open_cache(model=model)
    names = _fill(cache, passages)
    old = cache._current()
    (identity, *_) = cache.plan(QUESTION, names, AskOptions()).identities
    _change(model)
    cache.reload_model()
    with pytest.raises(DrainingError):
        old.pins.next_use(names, 5.0)
    with pytest.raises(DrainingError):
        old.runtime.ensure_entry(identity)
    stats = cache.runtime.stack.stats()
    assert (stats.entries["host"], stats.leases_open) == (0, 0)
    assert cache.next_use(names, in_s=5.0) > 0


def test_a_use_announced_while_the_model_changes_is_the_new_one_s(
    open_cache: Callable[..., ChunkCache],
    model: Path,
    passages: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = open_cache(model=model)
    names = _fill(cache, passages)
    stack, _ = cache.runtime.stack, _change(model)
    expect_use = stack.expect_use

    def reload_first(entry: Entry, in_seconds: float) -> bool:
        monkeypatch.setattr(stack, "expect_use", expect_use)
        cache.reload_model()
        return expect_use(entry, in_seconds)

    monkeypatch.setattr(stack, "expect_use", reload_first)
    num_held = cache.next_use(names, in_s=5.0)
    assert num_held == stack.stats().entries["host"] > 0
