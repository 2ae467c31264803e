"""A share of the answers is verified when nobody waits, and no answer is changed by it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from chunkcache import AskOptions
from chunkcache.background_verification import is_sampled
from chunkcache.engine.idle import IdleWork

QUESTION = "Who keeps the key?"


def settle(cache: Any) -> None:
    """Let the engine come to the end of what it does when it is idle."""
    engine = cache.runtime.engine
    engine.call(lambda: None).result()
    while engine.idle_counts.waiting:
        engine.call(lambda: None).result()


@pytest.fixture
def opened(open_cache: Callable[..., Any], passages: dict[str, str]) -> Callable[..., Any]:
    def make(store: str, **settings: Any) -> Any:
        cache = open_cache(store, **settings)
        for name, text in passages.items():
            cache.put(name, text)
        return cache

    return make


def test_the_sample_is_a_function_of_the_id() -> None:
    ids = [f"ans_{i:024x}" for i in range(2_000)]
    assert not any(is_sampled(i, 0.0) for i in ids)
    assert all(is_sampled(i, 1.0) for i in ids)
    tenth = {i for i in ids if is_sampled(i, 0.1)}
    half = {i for i in ids if is_sampled(i, 0.5)}
    assert tenth < half
    assert 0.08 < len(tenth) / len(ids) < 0.12
    assert 0.47 < len(half) / len(ids) < 0.53


def test_answers_are_verified_afterwards(
    opened: Callable[..., Any], passages: dict[str, str]
) -> None:
    cache = opened("store", verify_rate=1.0)
    asked = AskOptions(policy="none", max_tokens=6)
    for name in passages:
        cache.answer(QUESTION, [name], options=asked)
    settle(cache)
    stats = cache.runtime.verifier.stats()
    assert (stats.sampled, stats.verified, stats.dropped, stats.failed) == (3, 3, 0, 0)
    expected = [
        cache.answer(QUESTION, [n], policy="none", max_tokens=6, compare=True).verification
        for n in passages
    ]
    assert stats.mean_kl.num_values == stats.agreement.num_values == 3
    assert stats.mean_kl.total == pytest.approx(sum(v.mean_kl for v in expected))
    assert stats.agreement.total == pytest.approx(sum(v.agreement for v in expected))
    settle(cache)
    assert cache.runtime.verifier.stats().sampled == 3, "verified at once is not sampled"
    cache.answer(QUESTION, list(passages), policy="full", max_tokens=2)
    settle(cache)
    assert cache.runtime.verifier.stats().sampled == 3, "exact answers are not sampled"
    assert cache.runtime.pool.num_free_pages == cache.runtime.pool.num_pages
    assert cache.runtime.stack.stats().leases_open == 0


def test_nothing_is_verified_by_default(
    opened: Callable[..., Any], passages: dict[str, str]
) -> None:
    cache = opened("store")
    cache.answer(QUESTION, list(passages), max_tokens=2)
    settle(cache)
    assert cache.runtime.verifier.stats().sampled == 0


def test_no_answer_changes_a_bit(opened: Callable[..., Any], passages: dict[str, str]) -> None:
    """Invariant 4 with verifications between, before and beside the answers."""
    plain, verified = opened("plain"), opened("verified", verify_rate=1.0)
    names = list(passages)
    for cache in (plain, verified):
        cache.answer(QUESTION, names, max_tokens=1)
    questions = [f"{QUESTION} {n}" for n in range(6)]
    options = AskOptions(max_tokens=9)
    expected = [plain.stream(q, names, options).finished() for q in questions]
    one_by_one = [verified.stream(q, names, options).finished() for q in questions]
    growing = [verified.stream(q, names, options) for q in questions]
    together = [g.finished() for g in growing]
    for a, b, c in zip(expected, one_by_one, together, strict=True):
        assert a.token_ids == b.token_ids == c.token_ids
        assert torch.equal(a.first_logits, b.first_logits)
        assert torch.equal(a.first_logits, c.first_logits)
        assert a.report.account == b.report.account == c.report.account
    settle(verified)
    stats = verified.runtime.verifier.stats()
    assert stats.sampled == stats.verified == 13


def test_a_document_that_is_gone_is_verified_and_stays_gone(
    opened: Callable[..., Any], passages: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened("store", verify_rate=1.0)
    held: list[IdleWork] = []
    engine = cache.runtime.engine
    when_idle = engine.when_idle
    monkeypatch.setattr(engine, "when_idle", held.append)
    cache.answer(QUESTION, ["tower"], policy="none", max_tokens=4)
    cache.delete("tower")
    entries = cache.runtime.stack.stats().entries
    when_idle(held[0])
    settle(cache)
    stats = cache.runtime.verifier.stats()
    assert (stats.verified, stats.failed) == (1, 0)
    assert cache.runtime.stack.stats().entries == entries


def test_closing_does_not_wait_for_verifications(
    opened: Callable[..., Any], passages: dict[str, str]
) -> None:
    cache = opened("store", verify_rate=1.0)
    for n in range(8):
        cache.stream(f"{QUESTION} {n}", list(passages), AskOptions(max_tokens=2))
    cache.close()
    stats = cache.runtime.verifier.stats()
    assert stats.sampled == 8
    assert stats.verified + stats.dropped == 8
