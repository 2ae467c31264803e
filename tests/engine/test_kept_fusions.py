"""Finished fused prompts, kept: a repeat runs nothing; blind policies go on from the documents."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chunkcache.chunk_cache import ChunkCache
from chunkcache.engine.sampling import SamplingParams
from chunkcache.errors import CacheMissError, RequestCancelledError
from chunkcache.fusion.policies.registry import PolicyOptions
from chunkcache.planning import AskOptions, ChatTurn
from chunkcache.testing import TINY_FAMILIES

Caches = Callable[..., Any]
QUESTION = "Which bag is in the locker?"
BLIND = ("none", "lego")
POLICIES = ("none", "lego", "hybrid", "query", "deviation", "shift", "random")


def text_of(number: int) -> str:
    return f"Locker {number} holds bag {number * 7}. The key hangs behind door {number + 3}. "


def fill(cache: ChunkCache) -> ChunkCache:
    for number in range(4):
        cache.put(f"d{number}", text_of(number) + text_of(number + 40))
    return cache


@pytest.fixture
def filled(open_cache: Caches) -> ChunkCache:
    return fill(open_cache(kept_prompts_ratio=0.5))


def ask(cache: ChunkCache, question: str, names: list[str], policy: str, **fields: Any) -> Any:
    options = AskOptions(**{"policy": policy, "max_tokens": 5} | fields)
    return cache.stream(question, names, options).finished()


def same(a: Any, b: Any) -> bool:
    return torch.equal(a.first_logits, b.first_logits) and a.token_ids == b.token_ids


@pytest.mark.parametrize("policy", POLICIES)
def test_a_repeat_runs_nothing_and_has_the_same_bits(filled: ChunkCache, policy: str) -> None:
    names = ["d0", "d1", "d2"]
    first = ask(filled, QUESTION, names, policy)
    lookups = filled.runtime.stack.stats().lookups
    again = ask(filled, QUESTION, names, policy)
    assert same(first, again)
    assert filled.runtime.stack.stats().lookups == lookups
    account = again.report.account
    assert account.cached_tokens == account.prompt_tokens
    assert account.cached_tokens_by_source == {"device": account.prompt_tokens}
    opening = filled.plan(QUESTION, names, AskOptions()).layout.opening_end
    assert account.exact_prefix_tokens == opening
    assert {d.source for d in again.report.documents} == {"device"}
    assert again.report.charged_ratio == 0.0
    assert again.report.exact == first.report.exact
    assert again.report.policy == first.report.policy
    sampling = SamplingParams(1.1, seed=4)
    drawn = ask(filled, QUESTION, names, policy, sampling=sampling, max_tokens=20)
    filled.runtime.kept.clear()
    assert same(drawn, ask(filled, QUESTION, names, policy, sampling=sampling, max_tokens=20))
    filled.runtime.kept.check_integrity()
    filled.runtime.pool.check_integrity()


def test_what_differs_in_anything_is_another_composition(filled: ChunkCache) -> None:
    names = ["d0", "d1"]
    ask(filled, QUESTION, names, "hybrid")
    hits = filled.runtime.kept.stats().hits
    ask(filled, QUESTION + "!", names, "hybrid")
    ask(filled, QUESTION, names[::-1], "hybrid")
    ask(filled, QUESTION, names, "query")
    ask(filled, QUESTION, names, "hybrid", policy_options=PolicyOptions(recompute_ratio=0.4))
    ask(filled, QUESTION, names, "hybrid", policy_options=PolicyOptions(first_tokens=2))
    ask(filled, QUESTION, names, "hybrid", system="Be long.")
    ask(ChunkCache(filled.runtime, "other"), QUESTION, [], "none")
    assert filled.runtime.kept.stats().hits == hits


@pytest.mark.parametrize("policy", BLIND)
@pytest.mark.parametrize("preparation", ["alone", "system"])
def test_a_second_question_reuses_the_documents(
    open_cache: Caches, policy: str, preparation: str
) -> None:
    cache = fill(open_cache(kept_prompts_ratio=0.5, preparation=preparation, codec="raw"))
    names = ["d0", "d1", "d2"]
    ask(cache, QUESTION, names, policy)
    second = ask(cache, "Where does the key of the other one hang?", names, policy)
    layout = cache.plan(QUESTION, names, AskOptions()).layout
    documents_end = layout.chunks[-1].end
    account = second.report.account
    assert account.cached_tokens == documents_end
    assert account.cached_tokens_by_source == {"device": documents_end}
    assert account.recomputed_tokens == 0
    exact = layout.chunks[0].end if preparation == "system" else layout.opening_end
    assert account.exact_prefix_tokens == exact
    assert account.computed_tokens == account.prompt_tokens - documents_end
    cache.runtime.kept.clear()
    assert same(second, ask(cache, "Where does the key of the other one hang?", names, policy))


@pytest.mark.parametrize("policy", ["hybrid", "query", "deviation", "shift", "random"])
def test_a_policy_that_looks_at_the_question_does_not(filled: ChunkCache, policy: str) -> None:
    ask(filled, QUESTION, ["d0", "d1"], policy)
    second = ask(filled, "Where does the key hang?", ["d0", "d1"], policy)
    assert "device" not in second.report.account.cached_tokens_by_source


@pytest.mark.parametrize("policy", BLIND)
def test_the_next_turn_goes_on_from_the_last_prompt(filled: ChunkCache, policy: str) -> None:
    """Documents join at the second turn; at the third there are none."""
    options = AskOptions(policy=policy, max_tokens=4)
    turns = [ChatTurn("Which?", ["d0", "d1"])]
    for documents in (["d2"], []):
        last = filled.chat(turns, options).finished()
        turns[-1] = replace(turns[-1], reply=last.text)
        turns.append(ChatTurn("And then?", documents))
        warm = filled.chat(turns, options).finished()
        account = warm.report.account
        assert account.cached_tokens_by_source["device"] == last.report.account.prompt_tokens
        assert account.computed_tokens >= len(last.token_ids)
        filled.runtime.kept.clear()
        cold = filled.chat(turns, options).finished()
        assert "device" not in cold.report.account.cached_tokens_by_source
        assert same(warm, cold)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_family(open_cache: Caches, model_dir: Callable[..., Any], family: str) -> None:
    cache = fill(open_cache(kept_prompts_ratio=0.5, model=model_dir(family)))
    for policy in ("lego", "hybrid"):
        first = ask(cache, QUESTION, ["d0", "d1"], policy)
        other = ask(cache, "Where?", ["d0", "d1"], policy)
        again = ask(cache, QUESTION, ["d0", "d1"], policy)
        assert same(first, again)
        assert "device" in again.report.account.cached_tokens_by_source
        cache.runtime.kept.clear()
        assert same(other, ask(cache, "Where?", ["d0", "d1"], policy))


def test_cold_warm_and_repeated_have_the_same_bits(filled: ChunkCache) -> None:
    """Invariant 4 with pages among the places that chunks come from."""
    names = ["d0", "d1"]
    identities = filled.plan(QUESTION, names, AskOptions()).identities
    answers = []
    for source in ("computed", "host", "device"):
        if source == "computed":
            filled.runtime.stack.drop([i.key() for i in identities])
        if source != "device":
            filled.runtime.kept.clear()
        answers.append(ask(filled, QUESTION, names, "hybrid"))
        assert {d.source for d in answers[-1].report.documents} == {source}
    assert all(same(answers[0], a) for a in answers)


def test_a_deleted_document_takes_every_composition(filled: ChunkCache) -> None:
    for policy in ("none", "hybrid"):
        ask(filled, QUESTION, ["d0", "d1"], policy)
    filled.delete("d1")
    stats = filled.runtime.kept.stats()
    assert stats.tokens == 0
    filled.put("d1", text_of(1) + text_of(41))
    again = ask(filled, QUESTION, ["d0", "d1"], "hybrid")
    assert "device" not in again.report.account.cached_tokens_by_source


def test_what_is_missing_is_left_out_whatever_is_kept(filled: ChunkCache) -> None:
    """``skip`` looks at the tiers alone; ``error`` finds what it needs in the pages."""
    ask(filled, QUESTION, ["d0", "d1"], "none")
    identities = filled.plan(QUESTION, ["d0", "d1"], AskOptions()).identities
    filled.runtime.stack.drop([i.key() for i in identities])
    skipped = ask(filled, QUESTION, ["d0", "d1"], "none", on_miss="skip")
    assert {d.source for d in skipped.report.documents} == {"skipped"}
    kept = ask(filled, QUESTION, ["d0", "d1"], "none", on_miss="error")
    assert {d.source for d in kept.report.documents} == {"device"}
    filled.runtime.kept.clear()
    with pytest.raises(CacheMissError):
        ask(filled, QUESTION, ["d0", "d1"], "none", on_miss="error")


def test_several_answers_and_leaving_leak_nothing(filled: ChunkCache) -> None:
    first = ask(filled, QUESTION, ["d0"], "hybrid")
    options = AskOptions(policy="hybrid", max_tokens=200, num_answers=3)
    stream = filled.stream(QUESTION, ["d0"], options)
    next(stream.events())
    stream.cancel()
    with pytest.raises(RequestCancelledError):
        stream.answers()
    together = filled.stream(QUESTION, ["d0"], replace(options, max_tokens=5)).answers()
    assert together[0].token_ids == first.token_ids
    filled.runtime.pool.check_integrity()
    filled.runtime.kept.check_integrity()
    filled.runtime.kept.clear()
    assert filled.runtime.pool.num_unowned_pages == filled.runtime.pool.num_pages


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[..., Any], cache_dir: Any
) -> Iterator[ChunkCache]:
    """One cache for all examples: what is kept of one example is there in the next."""
    with ChunkCache.open(
        tmp_path_factory.mktemp("kept") / "store",
        str(model_dir(max_position_embeddings=1024)),
        cache_dir=cache_dir,
        chunk_tokens=24,
        preparation="alone",
        min_fused_context_tokens=0,
        min_mean_chunk_tokens=0,
        pool_tokens=1500,
        page_tokens=8,
        store_max_bytes=1 << 30,
        kept_prompts_ratio=1.0,
    ) as cache:
        yield fill(cache)


Turn = st.tuples(st.lists(st.integers(0, 3), max_size=2), st.integers(0, 2))


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    policy=st.sampled_from(["none", "lego", "hybrid", "full"]),
    history=st.lists(Turn, min_size=1, max_size=3),
    evicted=st.lists(st.integers(0, 190), min_size=3, max_size=3),
)
def test_random_histories_have_the_same_bits_whatever_survives(
    shared: ChunkCache, policy: str, history: list[Any], evicted: list[int]
) -> None:
    kept, pool = shared.runtime.kept, shared.runtime.pool
    options = AskOptions(policy=policy, max_tokens=3)
    turns: list[ChatTurn] = []
    warm: Any = None
    for number, (documents, question) in enumerate(history):
        turns.append(ChatTurn(f"Question {question}?", [f"d{i}" for i in documents]))
        warm = shared.chat(turns, options).finished()
        kept.make_room(evicted[number])
        assert same(warm, shared.chat(turns, options).finished())
        turns[-1] = replace(turns[-1], reply=warm.text)
    kept.clear()
    turns[-1] = replace(turns[-1], reply=None)
    assert same(warm, shared.chat(turns, options).finished())
    kept.check_integrity()
    pool.check_integrity()
