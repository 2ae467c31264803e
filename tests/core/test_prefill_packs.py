"""Prefills that wait together: packed, accounted for, and none the victim of another."""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import pytest
import torch

from chunkcache import AskOptions, ChunkCache
from chunkcache.errors import DrainingError
from chunkcache.identity import EntryIdentity
from chunkcache.model.prefill import IsolatedPrefill

Passages = dict[str, str]


@pytest.fixture
def cache(open_cache: Callable[..., ChunkCache]) -> ChunkCache:
    return open_cache(preparation="sink(4)")


@pytest.fixture
def held(cache: ChunkCache) -> Iterator[threading.Event]:
    """The engine waits for it, so that what is asked for meanwhile waits together."""
    gate = threading.Event()
    waiting = cache.runtime.engine.call(lambda: gate.wait(60))
    yield gate
    gate.set()
    waiting.result(60)


def _identities(cache: ChunkCache, passages: Passages) -> list[EntryIdentity]:
    cache.put("tower", passages["tower"])
    return list(cache.plan("", ["tower"], AskOptions()).identities)


def _note_packs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    steps = IsolatedPrefill.steps

    def noted(self: IsolatedPrefill, identities: Sequence[Any], codec: Any) -> Any:
        sizes.append(len(identities))
        return (yield from steps(self, identities, codec))

    monkeypatch.setattr(IsolatedPrefill, "steps", noted)
    return sizes


def test_what_waits_together_is_computed_together(
    cache: ChunkCache,
    passages: Passages,
    monkeypatch: pytest.MonkeyPatch,
    held: threading.Event,
) -> None:
    held.set()
    identities = _identities(cache, passages)
    runtime = cache.runtime
    alone = [runtime.packs.request(i).result(60) for i in identities]
    sizes = _note_packs(monkeypatch)
    gate = threading.Event()
    runtime.engine.call(lambda: gate.wait(60))
    futures = [runtime.packs.request(i) for i in identities]
    gate.set()
    for future, expected in zip(futures, alone, strict=True):
        got = future.result(60)
        assert torch.equal(got.entry.k, expected.entry.k)
        assert torch.equal(got.entry.v, expected.entry.v)
        assert got.num_rows == len(got.entry.identity.token_ids), "the prefix was there"
    assert sizes == [len(identities)]


def test_the_rows_of_a_prefix_are_counted_once(cache: ChunkCache, passages: Passages) -> None:
    identities = _identities(cache, passages)
    elsewhere = [
        EntryIdentity(i.model, i.namespace, "sink(4)", (17, 18, 19), i.codec, i.token_ids)
        for i in identities
    ]
    runtime = cache.runtime
    gate = threading.Event()
    runtime.engine.call(lambda: gate.wait(60))
    futures = [runtime.packs.request(i) for i in elsewhere]
    gate.set()
    rows = [
        future.result(60).num_rows - len(i.token_ids)
        for future, i in zip(futures, elsewhere, strict=True)
    ]
    assert rows == [3] + [0] * (len(elsewhere) - 1)


def test_one_that_fails_is_not_the_others_affair(
    cache: ChunkCache, passages: Passages, monkeypatch: pytest.MonkeyPatch
) -> None:
    identities = _identities(cache, passages)
    steps, bad = IsolatedPrefill.steps, identities[1]

    def failing(self: IsolatedPrefill, wanted: Sequence[EntryIdentity], codec: Any) -> Any:
        entries = yield from steps(self, wanted, codec)
        if bad in wanted:
            raise RuntimeError("out of memory")
        return entries

    monkeypatch.setattr(IsolatedPrefill, "steps", failing)
    runtime = cache.runtime
    gate = threading.Event()
    runtime.engine.call(lambda: gate.wait(60))
    futures = [runtime.packs.request(i) for i in identities]
    gate.set()
    for future, identity in zip(futures, identities, strict=True):
        if identity == bad:
            with pytest.raises(RuntimeError, match="out of memory"):
                future.result(60)
        else:
            assert future.result(60).entry.identity == identity


def test_a_question_is_answered_between_the_layers_of_a_pack(
    cache: ChunkCache, passages: Passages, monkeypatch: pytest.MonkeyPatch
) -> None:
    identities = _identities(cache, passages)
    steps, answered = IsolatedPrefill.steps, threading.Event()

    def waiting(
        self: IsolatedPrefill, wanted: Sequence[EntryIdentity], codec: Any
    ) -> Generator[None, None, Any]:
        entries = yield from steps(self, wanted, codec)
        while self is not cache.runtime.prefill and not answered.is_set():
            yield
        return entries

    monkeypatch.setattr(IsolatedPrefill, "steps", waiting)
    future = cache.runtime.packs.request(identities[0])
    answer = cache.answer("Which code?", ["tower"], max_tokens=3)
    assert len(answer.token_ids) == 3
    assert not future.done()
    answered.set()
    assert future.result(60).entry.identity == identities[0]


def test_nothing_is_begun_for_an_engine_that_has_ended(
    cache: ChunkCache, passages: Passages
) -> None:
    identity = _identities(cache, passages)[0]
    runtime = cache.runtime
    cache.close()
    with pytest.raises(DrainingError):
        runtime.packs.request(identity)
