"""Case tests D01 to D06, D14 and D15: chunks are found by what they are, and every row is counted."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkcache.model.template import DOCUMENT_JOINT, DOCUMENTS_INTRO, PromptTemplate
from chunkcache.planning import AskOptions, DocumentRef

Caches = Callable[..., Any]
Benches = Callable[..., Any]
Passages = dict[str, str]


def _sources(answer: Any) -> dict[str, str]:
    return {d.id: d.source for d in answer.report.documents}


@pytest.mark.parametrize(
    "system", ["Go.", "Be brief and kind.", "Answer as a porter would, in one word."]
)
def test_D01_what_stands_in_front_moves_nothing(
    open_cache: Caches, passages: Passages, system: str
) -> None:
    """Chunks are found behind a system prompt of any length."""
    cache = open_cache()
    for name, text in passages.items():
        cache.put(name, text)
    answer = cache.answer("Who?", list(passages), options=AskOptions(system=system, max_tokens=2))
    assert _sources(answer) == dict.fromkeys(passages, "host")
    assert cache.runtime.stack.stats().misses == {"absent": cache.runtime.stack.stats().prefills}


SEPARATORS = [
    DOCUMENT_JOINT,
    DOCUMENTS_INTRO,
    "\ue000chunkcache-user\ue001",
    "\ue000chunkcache-system\ue001",
    " # # ",
]


@pytest.mark.parametrize("separator", SEPARATORS, ids=repr)
def test_D02_a_text_may_hold_what_separates_texts(
    open_cache: Caches, passages: Passages, separator: str
) -> None:
    """No text is a separator: a chunk that holds one is one chunk, found again as it was."""
    cache = open_cache(chunk_tokens=128)
    text = f"Left side.{separator}Right side."
    result = cache.put("odd", text)
    assert (result.num_chunks, cache.get("odd").text) == (1, text)
    cache.put("tower", passages["tower"])
    for question in ("Which side?", f"Is it {separator} or not?"):
        stream = cache.stream(question, ["tower", "odd"], AskOptions(max_tokens=10))
        answer = stream.answer()
        assert _sources(answer) == {"tower": "host", "odd": "host"}
        assert "\ue000" not in answer.text
        segments = [s for s in stream.plan.layout.segments if s.kind == "template"]
        tokenizer = cache.runtime.model.tokenizer
        assert all("\ue000" not in tokenizer.decode(s.token_ids) for s in segments)


@settings(max_examples=8, deadline=None)
@given(
    cached=st.sets(st.integers(0, 5), min_size=1),
    order=st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True),
)
def test_D03_any_part_in_any_order(bench_of: Benches, cached: set[int], order: list[int]) -> None:
    """Of any set of chunks in any order exactly those hit that are cached, and the counts show it."""
    bench = bench_of("llama")
    chunks = [bench.draw(5 + i, 100 + i) for i in range(6)]
    bench = replace(bench, stack=_empty_stack())
    bench.run(bench.plan([chunks[i] for i in sorted(cached)], "none"))
    before = bench.stack.stats()
    report = bench.run(bench.plan([chunks[i] for i in order], "none")).outcome.report
    after = bench.stack.stats()
    num_hits = len(cached & set(order))
    assert after.hits["host"] - before.hits["host"] == num_hits
    assert after.prefills - before.prefills == len(order) - num_hits
    hits = [i for i, d in zip(order, report.documents, strict=True) if d.source == "host"]
    assert set(hits) == cached & set(order)
    assert report.account.fused_tokens == sum(len(chunks[i]) for i in hits)
    assert report.account.cache_write_tokens == sum(len(chunks[i]) for i in set(order) - cached)


def _empty_stack() -> Any:
    from chunkcache.store.host import HostTier
    from chunkcache.store.stack import TierStack

    return TierStack(HostTier(1 << 28), None)


@pytest.mark.parametrize("host_tier_bytes", [0, 1 << 28])
def test_D04_a_question_right_after_ingestion_hits(
    open_cache: Caches, host_tier_bytes: int
) -> None:
    """When a put has returned, the very next question finds every chunk."""
    cache = open_cache(host_tier_bytes=host_tier_bytes)
    source = "host" if host_tier_bytes else "disk"
    for index in range(12):
        text = f"Note {index}. The porter of house {index} keeps {index * 31} keys and a lamp."
        cache.put("note", text)
        answer = cache.answer("How many keys?", ["note"], max_tokens=1)
        assert _sources(answer) == {"note": source}
        assert answer.report.account.cache_write_tokens == 0


@settings(max_examples=10, deadline=None)
@given(
    policy=st.sampled_from(["deviation", "query", "hybrid", "random"]),
    ratio=st.floats(0, 1),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
)
def test_D05_the_recomputed_count_is_the_ratio(
    bench_of: Benches, policy: str, ratio: float, lengths: list[int]
) -> None:
    """The report's count is the ratio of the chunk tokens, rounded half up."""
    bench = bench_of("llama")
    chunks = [bench.draw(n, i) for i, n in enumerate(lengths)]
    bench.run(bench.plan(chunks, "none"))
    report = bench.run(bench.plan(chunks, policy, recompute_ratio=ratio)).outcome.report
    assert report.account.recomputed_tokens == int(ratio * sum(lengths) + 0.5)
    assert sum(d.recomputed_tokens for d in report.documents) == report.account.recomputed_tokens


def test_D05_the_ends_of_the_ratio(bench_of: Benches) -> None:
    """At 0 nothing runs again, at 1 all does, and then the logits are a plain forward's."""
    bench = bench_of("llama")
    chunks = [bench.draw(100, 1), bench.draw(100, 2)]
    for ratio, expected in ((0.0, 0), (0.15, 30), (1.0, 200)):
        run = bench.run(bench.plan(chunks, "hybrid", recompute_ratio=ratio))
        recomputed = sum(d.recomputed_tokens for d in run.outcome.report.documents)
        assert recomputed == expected
    plain = bench.plain_logits(run.layout.token_ids)[-1]
    assert (run.outcome.logits - plain).abs().max() <= 1e-4


@pytest.mark.parametrize(
    "text",
    [
        "The keys hang on the wall. ",
        " A lamp stands beside them",
        "\n\nIt burns.\n",
        "Codes: 4017 4018 4019 40",
        "A family: 👨‍👩‍👧‍👦 and half of one: 👨‍",
        "e\u0301te\u0301",
    ],
    ids=repr,
)
def test_D06_retrieved_chunks_hit(open_cache: Caches, text: str) -> None:
    """A chunk that was retrieved by its place hits whatever its edges: text is not encoded again."""
    cache = open_cache(chunk_tokens=16)
    cache.put("long", text * 4)
    cache.put("short", text)
    document = cache.get("long")
    assert "".join(document.chunk_text(c) for c in document.chunks) == document.text
    for index in range(len(document.chunks)):
        refs = [DocumentRef("long", (index,)), "short"]
        stream = cache.stream("Which?", refs, AskOptions(max_tokens=1))
        assert set(_sources(stream.answer()).values()) == {"host"}
        assert stream.plan.layout.chunks[0].token_ids == document.chunks[index].token_ids


async def test_D14_log_probabilities_of_the_prompt_are_refused(
    open_cache: Caches, passages: Passages
) -> None:
    """There are none in this build: a request that asks for them is refused by name, never cut."""
    import httpx

    from chunkcache_api.app import create_app

    cache = open_cache()
    cache.put("tower", passages["tower"])
    app = create_app(cache.runtime)
    body = {"query": "Who?", "document_ids": ["tower"], "max_tokens": 2}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test", trust_env=False
        ) as client,
    ):
        assert (await client.post("/v1/query", json=body)).status_code == 200
        for field in ("logprobs", "prompt_logprobs", "top_logprobs", "echo"):
            reply = await client.post("/v1/query", json=body | {field: 1})
            assert 400 <= reply.status_code < 500
            assert field in reply.text


@pytest.mark.parametrize("policy", ["none", "full", "deviation"])
@pytest.mark.parametrize("num_tail", [1, 2, 3])
@pytest.mark.parametrize("remainder", [0, 1, 15])
def test_D15_a_tail_of_one_token(
    make_bench: Any, load_tiny: Any, policy: str, num_tail: int, remainder: int
) -> None:
    """One to three tokens behind the chunks, at any place in a page, give a plain forward's logits.

    For ``none`` the chunk is prefilled behind the prompt's own opening, so that it is exact.
    """
    model = load_tiny("llama")
    opening = (40, 41, 42)
    bare = PromptTemplate(opening, (), (), (), (), has_system=True)
    bench = make_bench(replace(model, template=bare), page_tokens=16)
    system = len(model.tokenizer.encode_content("Be brief."))
    num_chunk = 64 + remainder - num_tail - system - len(opening)
    options = {"recompute_ratio": 1.0} if policy == "deviation" else {}
    preparation = "system" if policy == "none" else "alone"
    chunk, tail = bench.draw(num_chunk, 1), bench.draw(num_tail, 2)
    plan = bench.plan([chunk], policy, question=tail, preparation=preparation, **options)
    run = bench.run(plan)
    assert run.layout.num_tokens % 16 == remainder
    assert run.layout.query_positions == tuple(range(64 + remainder - num_tail, 64 + remainder))
    plain = bench.plain_logits(run.layout.token_ids)[-1]
    assert (run.outcome.logits - plain).abs().max() <= 1e-4
    assert torch.equal(run.outcome.logits.argmax(), plain.argmax())
    assert run.outcome.report.exact
