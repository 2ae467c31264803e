"""``POST /v1/query`` as JSON: what it answers and what it refuses."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import httpx
import pytest
from fastapi import FastAPI

from chunkcache.chunk_cache import ChunkCache
from chunkcache.planning import AskOptions, DocumentRef
from chunkcache.runtime import Runtime
from chunkcache_api.app import create_app

Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]

BODY = {"query": "What is the code of door 3?", "document_ids": ["handbook"], "max_tokens": 6}

VERIFY_FIELDS = {
    "kl_first",
    "mean_kl",
    "agreement",
    "agreeing_tokens",
    "full_answer",
    "full_ttft_ms",
}

pytestmark = pytest.mark.usefixtures("handbook")


def ask(client: httpx.Client, **fields: object) -> httpx.Response:
    return client.post("/v1/query", json=BODY | fields)


def refusal(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["code"], error["param"]


def test_an_answer_says_where_every_token_came_from(client: httpx.Client, runtime: Runtime) -> None:
    response = ask(client)
    assert response.status_code == 200
    body = response.json()
    same = ChunkCache(runtime).answer(BODY["query"], ["handbook"], max_tokens=6)
    assert body["answer"] == same.text
    assert body["object"] == "chunkcache.answer"
    assert body["model"] == "tiny-llama"
    assert body["finish_reason"] == "length"
    details = body["usage"]["prompt_tokens_details"]
    counted = ("exact_prefix_tokens", "fused_tokens", "recomputed_tokens", "computed_tokens")
    assert sum(details[name] for name in counted) == body["usage"]["prompt_tokens"]
    assert details["cached_tokens"] > 0
    assert body["chunkcache"]["policy"].startswith("hybrid(0.15")
    assert body["chunkcache"]["documents"][0]["id"] == "handbook"
    assert body["citations"][0]["document_id"] == "handbook"


def test_options_reach_the_policy(client: httpx.Client) -> None:
    body = ask(client, chunkcache={"policy": "query", "recompute_ratio": 0.4, "layers": "all"})
    assert body.json()["chunkcache"]["policy"] == "query(0.4, layers=all, sum, chunk_floor=0.5)"
    options = {"policy": "shift", "recompute_ratio": 0.4, "per_chunk": True}
    shifted = ask(client, chunkcache=options).json()["chunkcache"]
    assert shifted["policy"] == "shift(0.4, layer=1, per=chunk)"
    assert not shifted["exact"]
    exact = ask(client, chunkcache={"policy": "full"}).json()
    assert exact["chunkcache"]["exact"] is True


def test_verify_puts_the_full_prefill_beside_the_answer(client: httpx.Client) -> None:
    fused = ask(client, chunkcache={"verify": True}).json()
    exact = ask(client, chunkcache={"policy": "full"}).json()
    verify = fused["chunkcache"]["verify"]
    assert set(verify) == VERIFY_FIELDS
    assert verify["full_answer"] == exact["answer"]
    assert verify["kl_first"] >= 0
    assert verify["mean_kl"] > 0
    assert verify["full_ttft_ms"] > 0
    checked = ask(client, chunkcache={"policy": "full", "verify": True}).json()
    verify = checked["chunkcache"]["verify"]
    assert verify["full_answer"] == checked["answer"]
    assert (verify["agreement"], verify["agreeing_tokens"]) == (1.0, 6)
    assert verify["kl_first"] == 0
    assert verify["mean_kl"] == pytest.approx(0, abs=1e-6)
    assert ask(client).json()["chunkcache"]["verify"] is None


def test_sampling_is_a_function_of_the_seed(client: httpx.Client) -> None:
    drawn = [
        ask(client, temperature=1.5, seed=s, max_tokens=12).json()["answer"] for s in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_dry_run_plans_and_runs_nothing(client: httpx.Client, runtime: Runtime) -> None:
    before = runtime.stack.stats()
    body = ask(client, chunkcache={"dry_run": True}).json()
    assert runtime.stack.stats().lookups == before.lookups
    real = ask(client).json()
    assert body["object"] == "chunkcache.plan"
    assert body["prompt_tokens"] == real["usage"]["prompt_tokens"]
    assert body["policy"] == real["chunkcache"]["policy"]
    document = body["documents"][0]
    assert document["id"] == "handbook"
    assert document["cached_chunks"] == document["chunks"] > 1
    assert body["warnings"] == []


def test_the_served_model_may_be_named(client: httpx.Client) -> None:
    assert ask(client, model="tiny-llama").status_code == 200
    assert refusal(ask(client, model="other")) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e9}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": 1 << 70}, "seed"),
        ({"stream": 1}, "stream"),
        ({"query": 3}, "query"),
        ({"query": None}, "query"),
        ({"query": "q" * 300_000}, "query"),
        ({"system": "s" * 300_000}, "system"),
        ({"document_ids": "handbook"}, "document_ids"),
        ({"document_ids": ["handbook", 7]}, "document_ids[1]"),
        ({"document_ids": ["handbook"] * 1_000}, "document_ids"),
        ({"top_k": 3}, "document_ids"),
        ({"document_ids": None}, "document_ids"),
        ({"document_ids": None, "top_k": 0}, "top_k"),
        ({"stream": True, "chunkcache": {"dry_run": True}}, "stream"),
        ({"chunkcache": {"policy": "magic"}}, "chunkcache.policy"),
        ({"chunkcache": {"recompute_ratio": 2}}, "chunkcache.recompute_ratio"),
        ({"chunkcache": {"policy": "full", "first_tokens": 3}}, "chunkcache.first_tokens"),
        ({"chunkcache": {"policy": "query", "layers": "odd"}}, "chunkcache.layers"),
        ({"chunkcache": {"on_miss": "pray"}}, "chunkcache.on_miss"),
        ({"chunkcache": {"verify": "yes"}}, "chunkcache.verify"),
        ({"chunkcache": []}, "chunkcache"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(
    client: httpx.Client, fields: dict[str, object], param: str
) -> None:
    """A08."""
    assert refusal(ask(client, **fields)) == (400, "invalid_value", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 5}, "prompt_logprobs"),
        ({"top_k_sampling": 0}, "top_k_sampling"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"tenant": "other"}, "tenant"),
        ({"k" * 1_000: 1}, "k" * 200),
        ({"chunkcache": {"salt": "x"}}, "chunkcache.salt"),
        ({"document_ids": None, "top_k": 3}, "top_k"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    client: httpx.Client, fields: dict[str, object], param: str
) -> None:
    """D14 and A08: nothing is ignored."""
    assert refusal(ask(client, **fields)) == (400, "unsupported_parameter", param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"query": "q", "document_ids": [], "temperature": NaN}', "temperature"),
        (b'{"query": "q", "document_ids": [], "temperature": Infinity}', "temperature"),
        (b'{"query": "q", "document_ids": [], "temperature": 1e999}', "temperature"),
        (b'{"query": "\\ud800", "document_ids": []}', None),
        (b'{"query": "\xff", "document_ids": []}', None),
        (b'{"query": ', None),
        (b"", None),
        (b"[]", None),
        (b"null", None),
        (b'{"query": "q", "document_ids": ' + b"[" * 100_000, None),
        (b'{"query":' + b'{"a":' * 100_000, None),
        (b'{"query": "q", "document_ids": [], "seed": ' + b"9" * 6_000 + b"}", None),
    ],
)
def test_bodies_that_are_no_good_json_are_refused(
    client: httpx.Client, body: bytes, param: str | None
) -> None:
    """A03 (nesting) and A08."""
    response = client.post("/v1/query", content=body, headers={"content-type": "application/json"})
    assert refusal(response) == (400, "invalid_value", param)


def test_a_body_must_be_declared_as_json(client: httpx.Client) -> None:
    response = client.post("/v1/query", content=b"{}", headers={"content-type": "text/plain"})
    assert refusal(response) == (415, "unsupported_media_type", None)


def test_an_unknown_document_is_not_found(client: httpx.Client) -> None:
    response = ask(client, document_ids=["handbook", "nowhere"])
    assert refusal(response) == (404, "document_not_found", "document_ids")


def test_a_prompt_over_the_context_is_refused_with_both_numbers(client: httpx.Client) -> None:
    response = ask(client, document_ids=["handbook"] * 20)
    assert refusal(response) == (400, "context_length_exceeded", "document_ids")
    assert "2048" in response.json()["error"]["message"]


def test_a_miss_is_an_error_where_asked(client: httpx.Client, runtime: Runtime) -> None:
    client.put("/v1/documents/dropped", json={"text": "The mast is nine metres high."})
    cache = ChunkCache(runtime)
    plan = cache.plan("q", ["dropped"], AskOptions())
    runtime.stack.drop([i.key() for i in plan.identities])
    missed = ask(client, document_ids=["dropped"], chunkcache={"on_miss": "error"})
    assert refusal(missed) == (422, "cache_miss", "document_ids")
    skipped = ask(client, document_ids=["dropped"], chunkcache={"on_miss": "skip"}).json()
    assert [w["code"] for w in skipped["chunkcache"]["warnings"]] == ["chunk_skipped"]


def test_bad_requests_leave_a_good_one_alone(client: httpx.Client, runtime: Runtime) -> None:
    """A08: concurrently, and nothing is left behind."""
    alone = ask(client, max_tokens=20).json()["answer"]
    bad = [{"max_tokens": 0}, {"temperature": 1e9}, {"document_ids": ["no"]}, {"top_k": 1}]
    with ThreadPoolExecutor(8) as threads:
        good = [threads.submit(ask, client, max_tokens=20) for _ in range(3)]
        refused = [threads.submit(ask, client, **bad[i % len(bad)]) for i in range(12)]
        assert all(r.result().status_code in (400, 404) for r in refused)
        assert [g.result().json()["answer"] for g in good] == [alone] * 3
    assert runtime.engine.num_open_requests == 0


class FirstDocuments:
    """A retriever that takes documents in order of their ids."""

    def __init__(self, cache: ChunkCache) -> None:
        self._cache = cache

    def retrieve(self, query: str, top_k: int, filters: object = None) -> Sequence[DocumentRef]:
        if query == "fail":
            raise RuntimeError("/secret/path")
        return [DocumentRef(d.document_id, (0,)) for d in self._cache.list(limit=top_k)]


def test_top_k_asks_the_retriever(runtime: Runtime, serve: Serve) -> None:
    with serve(create_app(runtime, retriever_factory=FirstDocuments)) as client:
        response = client.post("/v1/query", json={"query": "q", "top_k": 1, "max_tokens": 2})
        assert response.json()["chunkcache"]["documents"][0]["chunks"] == 1
        failed = client.post("/v1/query", json={"query": "fail", "top_k": 1})
        assert refusal(failed) == (500, "internal_error", None)
        assert "secret" not in failed.text


def test_auto_is_refused_without_a_calibration_and_with_a_target_that_is_none(
    client: httpx.Client,
) -> None:
    """The message names the command; a target of another policy is refused too."""
    response = ask(client, chunkcache={"policy": "auto", "target_kl": 0.02})
    assert refusal(response) == (400, "not_calibrated", "chunkcache.policy")
    assert "chunkcache eval auto" in response.json()["error"]["message"]
    response = ask(client, chunkcache={"policy": "auto", "target_kl": 0})
    assert refusal(response) == (400, "invalid_value", "chunkcache.target_kl")
    response = ask(client, chunkcache={"policy": "hybrid", "target_kl": 0.02})
    assert refusal(response) == (400, "invalid_value", "chunkcache.target_kl")
