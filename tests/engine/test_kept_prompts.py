"""Finished full prefills, kept: what begins alike starts from them and has the same bits."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chunkcache.chunk_cache import ChunkCache
from chunkcache.engine import kept_prompts
from chunkcache.engine.sampling import SamplingParams
from chunkcache.errors import RequestCancelledError
from chunkcache.fusion import full_prefill
from chunkcache.planning import AskOptions, ChatTurn
from chunkcache.testing import TINY_FAMILIES

Caches = Callable[..., Any]
BLOCK = 16
LONG = "Locker {n} holds bag {m}, and the key hangs behind the third door on the left. "


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (full_prefill, kept_prompts):
        monkeypatch.setattr(module, "BLOCK_TOKENS", BLOCK)


def full(**fields: Any) -> AskOptions:
    return AskOptions(**{"policy": "full", "max_tokens": 6, "num_answers": 1} | fields)


def text_of(number: int, repeats: int = 2) -> str:
    return "".join(LONG.format(n=number + i, m=7 * number + i) for i in range(repeats))


@pytest.fixture
def documents() -> dict[str, str]:
    return {f"doc-{i}": text_of(10 * i) for i in range(4)}


@pytest.fixture
def open_cache(open_cache: Caches) -> Caches:
    return partial(open_cache, kept_prompts_ratio=0.5)


@pytest.fixture
def filled(open_cache: Caches, documents: dict[str, str]) -> ChunkCache:
    return fill(open_cache(), documents)


def fill(cache: ChunkCache, documents: dict[str, str]) -> ChunkCache:
    for name, text in documents.items():
        cache.put(name, text)
    return cache


def ask(cache: ChunkCache, question: str, names: list[str], **fields: Any) -> Any:
    return cache.stream(question, names, full(**fields)).finished()


def exact_of(finished: Any) -> int:
    return finished.report.account.exact_prefix_tokens


def same(a: Any, b: Any) -> bool:
    return torch.equal(a.first_logits, b.first_logits) and a.token_ids == b.token_ids


def test_a_repeat_and_a_second_question_start_from_the_first(
    filled: ChunkCache, open_cache: Caches
) -> None:
    first = ask(filled, "Which bag?", ["doc-1", "doc-2"])
    again = ask(filled, "Which bag?", ["doc-1", "doc-2"])
    other = ask(filled, "Who has the key?", ["doc-1", "doc-2"])
    num_tokens = first.report.account.prompt_tokens
    assert exact_of(first) == 0
    assert exact_of(again) == (num_tokens - 1) // BLOCK * BLOCK
    documents_end = filled.plan("", ["doc-1", "doc-2"], full()).layout.chunks[-1].end
    assert documents_end // BLOCK * BLOCK <= exact_of(other) < num_tokens
    assert again.report.account.cached_tokens_by_source == {"device": exact_of(again)}
    assert again.report.charged_ratio < first.report.charged_ratio
    assert same(first, again)
    assert again.report.exact
    filled.runtime.pool.check_integrity()
    filled.runtime.kept.check_integrity()
    filled.close()
    without = fill(open_cache("other", kept_prompts_ratio=0.0), {})
    for name in ("doc-1", "doc-2"):
        without.put(name, text_of(10 * int(name[-1])))
    for question, kept in (("Which bag?", first), ("Who has the key?", other)):
        for _ in range(2):
            plain = ask(without, question, ["doc-1", "doc-2"])
            assert exact_of(plain) == 0
            assert same(plain, kept)


def test_documents_count_what_was_reused_of_each(filled: ChunkCache) -> None:
    ask(filled, "Which bag?", ["doc-1", "doc-2"])
    joined = ask(filled, "Which bag?", ["doc-1", "doc-3"])
    by_id = {d.id: d for d in joined.report.documents}
    assert by_id["doc-1"].source == "device"
    assert by_id["doc-1"].recomputed_tokens == 0
    assert by_id["doc-3"].source == "not_loaded"
    assert 0 <= by_id["doc-3"].tokens - by_id["doc-3"].recomputed_tokens < BLOCK
    account = joined.report.account
    assert account.recomputed_tokens == sum(d.recomputed_tokens for d in joined.report.documents)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_family_gives_the_same_bits_or_does_without(
    open_cache: Caches, model_dir: Callable[..., Any], documents: dict[str, str], family: str
) -> None:
    """Sliding windows, experts, soft-caps; a rotation that depends on the length keeps nothing."""
    cache = fill(open_cache(model=model_dir(family)), documents)
    names = ["doc-0", "doc-1"]
    first = ask(cache, "Which bag?", names)
    other = ask(cache, "Who has the key?", names)
    again = ask(cache, "Which bag?", names)
    is_length_dependent = cache.runtime.model.runner.spec.rope.is_length_dependent
    assert (exact_of(again) > 0) is not is_length_dependent
    assert same(first, again)
    cache.runtime.kept.clear()
    assert same(other, ask(cache, "Who has the key?", names))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotation_of_the_whole_length_keeps_nothing(
    open_cache: Caches, model_dir: Callable[..., Any], documents: dict[str, str], kind: str
) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0 + 0.1 * i for i in range(8)]}
        rope |= {"long_factor": [2.0 + 0.7 * i for i in range(8)]}
        rope |= {"original_max_position_embeddings": 64}
    cache = fill(open_cache(model=model_dir(rope_parameters=rope)), documents)
    answers = [ask(cache, "Which bag?", ["doc-0", "doc-1"]) for _ in range(2)]
    assert [exact_of(a) for a in answers] == [0, 0]
    assert same(*answers)
    assert cache.runtime.kept.stats().tokens == 0


def test_a_next_turn_starts_from_the_last(filled: ChunkCache) -> None:
    """Replies run again: what decoding has written is never reused."""
    turns = [ChatTurn("Which bag?", ["doc-1"])]
    first = filled.chat(turns, full()).finished()
    turns = [ChatTurn("Which bag?", ["doc-1"], first.text), ChatTurn("And the key?", ["doc-2"])]
    warm = filled.chat(turns, full()).finished()
    shared = first.report.account.prompt_tokens
    assert (shared - 2 * BLOCK) < exact_of(warm) <= shared
    filled.runtime.kept.clear()
    cold = filled.chat(turns, full()).finished()
    assert exact_of(cold) == 0
    assert same(warm, cold)


@pytest.mark.parametrize("page_tokens", [1, 5, 16, 24, 256])
def test_pages_and_blocks_need_not_fit(
    open_cache: Caches, documents: dict[str, str], page_tokens: int
) -> None:
    cache = fill(open_cache(page_tokens=page_tokens), documents)
    answers: dict[Any, Any] = {}
    found: Any = None
    orders = [["doc-0", "doc-1"], ["doc-0", "doc-2"], ["doc-0", "doc-1", "doc-2"]]
    for _ in range(2):
        for number, order in enumerate(orders):
            for sampling in (SamplingParams(), SamplingParams(0.9, seed=3)):
                found = ask(cache, "Which bag?", order, sampling=sampling)
                before = answers.setdefault((number, sampling), found)
                assert same(found, before)
    assert exact_of(found) > 0
    cache.runtime.pool.check_integrity()
    cache.runtime.kept.check_integrity()
    for number, order in enumerate(orders):
        cache.runtime.kept.clear()
        assert same(answers[number, SamplingParams()], ask(cache, "Which bag?", order))


def test_kept_prompts_give_way_to_requests(open_cache: Caches, documents: dict[str, str]) -> None:
    """A pool of two prompts' size: nothing waits for ever, nothing is refused, the oldest go."""
    cache = fill(open_cache(), documents)
    num_tokens = cache.plan("Which bag?", ["doc-0", "doc-1"], full()).layout.num_tokens
    cache.close()
    narrow = open_cache(pool_tokens=2 * num_tokens + 20, kept_prompts_ratio=1.0)
    names = list(documents)
    for a in names:
        for b in names:
            if a != b:
                ask(narrow, "Which bag?", [a, b])
    stats = narrow.runtime.kept.stats()
    assert stats.evictions > 0
    assert 0 < stats.tokens <= 2 * num_tokens + 20
    together = [narrow.stream("Which bag?", [a, "doc-0"], full()) for a in names[1:]]
    for stream in together:
        stream.finished()
    narrow.runtime.kept.check_integrity()
    narrow.runtime.pool.check_integrity()


def test_the_share_is_kept_to(open_cache: Caches, documents: dict[str, str]) -> None:
    cache = fill(open_cache(pool_tokens=1024, kept_prompts_ratio=0.1), documents)
    for name in documents:
        ask(cache, "Which bag?", [name])
        assert cache.runtime.pool.num_kept_pages <= 0.1 * cache.runtime.pool.num_pages
    assert cache.runtime.kept.stats().evictions > 0


def test_a_tenant_starts_from_its_own_alone(filled: ChunkCache, documents: dict[str, str]) -> None:
    other = fill(ChunkCache(filled.runtime, "somebody else"), documents)
    ask(filled, "Which bag?", ["doc-1"])
    plan = other.plan("Which bag?", ["doc-1"], full())
    assert not filled.runtime.kept_prompts.ready(plan, other.catalog.namespace)
    assert filled.runtime.kept_prompts.ready(plan, filled.catalog.namespace)
    theirs = ask(other, "Which bag?", ["doc-1"])
    assert exact_of(theirs) == 0
    assert exact_of(ask(other, "Which bag?", ["doc-1"])) > 0
    dropped = filled.runtime.kept.drop_tenant(filled.catalog.namespace)
    assert dropped > 0
    assert exact_of(ask(other, "Which bag?", ["doc-1"])) > 0
    assert exact_of(ask(filled, "Which bag?", ["doc-1"])) == 0


@pytest.mark.parametrize("how", ["delete", "update", "gc"])
def test_a_document_that_goes_takes_what_read_it(
    filled: ChunkCache, documents: dict[str, str], how: str
) -> None:
    """Blocks behind it hold a trace of it; those in front do not."""
    from chunkcache.upkeep.collect import collect

    first = ask(filled, "Which bag?", ["doc-1", "doc-2", "doc-3"])
    chunks = {c.chunk_id for c in filled.get("doc-2").chunks}
    assert chunks <= filled.runtime.kept.traces()
    tokens_before = filled.runtime.kept.stats().tokens
    if how == "delete":
        filled.delete("doc-2")
    elif how == "update":
        filled.put("doc-2", "Another text.")
    else:
        filled.put("doc-2", documents["doc-2"], ttl_seconds=0.01)
        while filled.catalog.get("doc-2") is not None:
            pass
        collect(filled.runtime.env, drop_models=(), dry_run=False)
        filled.runtime.follow_removals()
    assert not chunks & filled.runtime.kept.traces()
    assert 0 < filled.runtime.kept.stats().tokens < tokens_before
    filled.put("doc-2", documents["doc-2"])
    again = ask(filled, "Which bag?", ["doc-1", "doc-2", "doc-3"])
    assert 0 < exact_of(again) < tokens_before
    assert same(first, again)


def test_one_that_goes_while_it_is_read_is_not_kept(filled: ChunkCache) -> None:
    gate = threading.Event()
    held = filled.runtime.engine.call(gate.wait)
    stream = filled.stream("Which bag?", ["doc-1", "doc-2"], full())
    chunks = {c.chunk_id for c in filled.get("doc-2").chunks}
    filled.delete("doc-2")
    gate.set()
    held.result()
    stream.finished()
    assert not chunks & filled.runtime.kept.traces()
    assert filled.runtime.kept.stats().tokens > 0


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_leaving_early_leaks_no_page(filled: ChunkCache, num_steps: int) -> None:
    ask(filled, "Which bag?", ["doc-1", "doc-2"])
    for num_answers in (1, 3):
        stream = filled.stream(
            "And who?", ["doc-1", "doc-2"], full(max_tokens=200, num_answers=num_answers)
        )
        events = stream.events()
        for _ in range(num_steps):
            next(events)
        stream.cancel()
        with pytest.raises(RequestCancelledError):
            stream.answers()
    ask(filled, "Which bag?", ["doc-1", "doc-2"])
    filled.runtime.pool.check_integrity()
    filled.runtime.kept.check_integrity()
    filled.runtime.kept.clear()
    assert filled.runtime.pool.num_unowned_pages == filled.runtime.pool.num_pages


def test_a_verification_neither_uses_nor_keeps(filled: ChunkCache) -> None:
    """Its full prefill is timed: it has to run."""
    ask(filled, "Which bag?", ["doc-1"])
    plain = filled.answer("Which bag?", ["doc-2"], policy="none")
    before = filled.runtime.kept.stats()
    answer = filled.answer("Which bag?", ["doc-2"], policy="none", compare=True)
    assert answer.verification is not None
    assert answer.text == plain.text
    after = filled.runtime.kept.stats()
    assert (after.hits, after.tokens) == (before.hits + 1, before.tokens)
    later = ask(filled, "Which bag?", ["doc-2"])  # behind what doc-1's prompt left: the opening
    assert exact_of(later) < later.report.account.prompt_tokens / 2


def test_many_at_once_are_as_if_alone(filled: ChunkCache, documents: dict[str, str]) -> None:
    names = list(documents)
    asked = [(f"Question {i % 3}?", [names[i % 4], names[(i + 1) % 4]]) for i in range(12)]
    streams = [filled.stream(q, ids, full()) for q, ids in asked]
    together = [s.finished() for s in streams]
    assert sum(exact_of(t) > 0 for t in together) > 4
    for (question, ids), found in zip(asked, together, strict=True):
        filled.runtime.kept.clear()
        assert same(found, ask(filled, question, ids))


def test_closing_gives_everything_back(filled: ChunkCache) -> None:
    ask(filled, "Which bag?", ["doc-1"])
    old = filled.runtime
    filled.close()
    assert old.kept.stats().tokens == 0
    assert old.pool.num_unowned_pages == old.pool.num_pages


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[..., Any], cache_dir: Any
) -> Iterator[ChunkCache]:
    """One cache for all examples: what is kept of one example is there in the next."""
    folder = tmp_path_factory.mktemp("kept") / "store"
    with ChunkCache.open(
        folder,
        str(model_dir()),
        cache_dir=cache_dir,
        chunk_tokens=24,
        preparation="alone",
        pool_tokens=1200,
        page_tokens=8,
        store_max_bytes=1 << 30,
        kept_prompts_ratio=1.0,
    ) as cache:
        yield fill(cache, {f"d{i}": text_of(10 * i, 1) for i in range(4)})


Turn = st.tuples(st.lists(st.integers(0, 3), max_size=2), st.integers(0, 2))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    histories=st.lists(st.lists(Turn, min_size=1, max_size=3), min_size=1, max_size=3),
    evicted=st.lists(st.integers(0, 150), max_size=4),
)
def test_random_histories_have_the_same_bits_whatever_survives(
    shared: ChunkCache, histories: list[Any], evicted: list[int]
) -> None:
    """Conversations that begin alike or not, with blocks lost in between."""
    kept, pool = shared.runtime.kept, shared.runtime.pool
    for history in histories:
        turns: list[ChatTurn] = []
        for number, (documents, question) in enumerate(history):
            turns.append(ChatTurn(f"Question {question}?", [f"d{i}" for i in documents]))
            warm = shared.chat(turns, full(max_tokens=3)).finished()
            if number < len(evicted):
                kept.make_room(pool.num_unowned_pages + evicted[number])
            again = shared.chat(turns, full(max_tokens=3)).finished()
            assert same(warm, again)
            if number == len(history) - 1:
                kept.clear()
                cold = shared.chat(turns, full(max_tokens=3)).finished()
                assert exact_of(cold) == 0
                assert same(warm, cold)
            turns[-1] = ChatTurn(turns[-1].text, turns[-1].documents, warm.text)
    kept.check_integrity()
    pool.check_integrity()
