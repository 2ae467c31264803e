"""``show_prompt``: every token of the prompt with what became of it, for whoever asks."""

import json
from collections import Counter
from typing import Any

import httpx
import pytest

from chunkcache.runtime import Runtime
from chunkcache_api.app import create_app

QUESTION = {"query": "What is the code of door 3?", "document_ids": ["handbook"], "max_tokens": 4}


def ask(client: httpx.Client, **reuse: Any) -> dict[str, Any]:
    body = QUESTION | {"chunkcache": {"show_prompt": True, **reuse}}
    response = client.post("/v1/query", json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("policy", ["hybrid", "none", "full", "lego"])
def test_the_pieces_are_the_prompt_and_add_up_to_its_account(
    client: httpx.Client, handbook: str, policy: str
) -> None:
    body = ask(client, policy=policy)
    details = body["usage"]["prompt_tokens_details"]
    pieces = body["chunkcache"]["prompt"]
    tokens: Counter[str] = Counter()
    for piece in pieces:
        tokens[piece["use"]] += piece["tokens"]
    assert sum(tokens.values()) == body["usage"]["prompt_tokens"]
    assert {use: tokens[use] for use in ("exact", "fused", "recomputed", "computed")} == {
        "exact": details["exact_prefix_tokens"],
        "fused": details["fused_tokens"],
        "recomputed": details["recomputed_tokens"],
        "computed": details["computed_tokens"],
    }
    shown = "".join(p["text"] for p in pieces if p["kind"] == "chunk")
    assert shown == client.get("/v1/documents/handbook").json()["text"]
    assert "".join(p["text"] for p in pieces if p["kind"] == "query") == QUESTION["query"]
    assert {p["document_id"] for p in pieces if p["kind"] == "chunk"} == {handbook}
    assert {p["document_id"] for p in pieces if p["kind"] != "chunk"} == {None}


def test_what_a_document_recomputed_is_what_is_shown(client: httpx.Client, handbook: str) -> None:
    body = ask(client)
    (document,) = body["chunkcache"]["documents"]
    pieces = [p for p in body["chunkcache"]["prompt"] if p["kind"] == "chunk"]
    assert sum(p["tokens"] for p in pieces) == document["tokens"]
    again = sum(p["tokens"] for p in pieces if p["use"] == "recomputed")
    assert 0 < again == document["recomputed_tokens"] < document["tokens"]


def test_a_character_across_pieces_is_not_broken(client: httpx.Client) -> None:
    text = " ".join(f"Tür {n}: Schlüssel 🔑 Nummer {n * 7}, dahinter 林 und ö." for n in range(9))
    assert client.put("/v1/documents/emoji", json={"text": text}).status_code == 201
    body = QUESTION | {"document_ids": ["emoji"], "chunkcache": {"show_prompt": True}}
    pieces = client.post("/v1/query", json=body).json()["chunkcache"]["prompt"]
    assert any(p["use"] == "recomputed" for p in pieces)
    assert "".join(p["text"] for p in pieces if p["kind"] == "chunk") == text


def test_it_is_shown_only_where_it_is_asked_for(client: httpx.Client, handbook: str) -> None:
    plain = client.post("/v1/query", json=QUESTION).json()
    assert "prompt" not in plain["chunkcache"]
    shown = ask(client)
    account = client.get(f"/v1/requests/{shown['id']}").json()
    assert "prompt" not in account["chunkcache"]
    assert "door" not in json.dumps(account)


def test_streams_and_conversations_show_it_at_their_end(
    client: httpx.Client, handbook: str
) -> None:
    body = QUESTION | {"stream": True, "chunkcache": {"show_prompt": True}}
    lines = client.post("/v1/query", json=body).text.split("\n\n")
    done = json.loads(lines[-3].removeprefix("data: "))
    assert done["response"]["chunkcache"]["prompt"][0]["kind"] == "template"
    chat = {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": "Which door?"}],
        "documents": [{"id": handbook}],
        "max_tokens": 2,
        "chunkcache": {"show_prompt": True},
    }
    pieces = client.post("/v1/chat/completions", json=chat).json()["chunkcache"]["prompt"]
    assert "".join(p["text"] for p in pieces if p["kind"] == "query") == "Which door?"
    response = {
        "model": "tiny-llama",
        "input": "Which door?",
        "max_output_tokens": 2,
        "chunkcache": {"show_prompt": True},
    }
    pieces = client.post("/v1/responses", json=response).json()["chunkcache"]["prompt"]
    assert "".join(p["text"] for p in pieces if p["kind"] == "query") == "Which door?"


def test_a_document_is_listed_with_the_tiers_that_hold_its_chunks(
    make_runtime: Any, serve: Any
) -> None:
    with make_runtime() as runtime, serve(create_app(runtime)) as client:
        assert_tiers(client, runtime)


def assert_tiers(client: httpx.Client, runtime: Runtime) -> None:
    text = " ".join(f"The code of door {n} is {n * 37 % 1000}." for n in range(12))
    client.put("/v1/documents/handbook", json={"text": text})
    (listed,) = client.get("/v1/documents", params={"include": "tiers"}).json()["data"]
    num_chunks = listed["num_chunks"]
    assert num_chunks > 1
    assert sum(listed["tiers"].values()) == num_chunks
    assert "none" not in listed["tiers"]
    assert "tiers" not in client.get("/v1/documents").json()["data"][0]
    runtime.stack.forget_model(runtime.model.runner.digest)  # RAM is emptied, the disk is not
    (listed,) = client.get("/v1/documents", params={"include": "tiers"}).json()["data"]
    assert listed["tiers"] == {"disk": num_chunks}
    client.post("/v1/query", json=QUESTION)
    (listed,) = client.get("/v1/documents", params={"include": "tiers"}).json()["data"]
    assert listed["tiers"] == {"host": num_chunks}
    refused = client.get("/v1/documents", params={"include": "text"})
    assert refused.status_code == 400


def test_the_figures_of_the_cache_are_those_of_the_answers(make_runtime: Any, serve: Any) -> None:
    with make_runtime(host_tier_bytes=1 << 20) as runtime, serve(create_app(runtime)) as client:
        before = client.get("/v1/cache/stats").json()
        assert before["hit_ratio"] is before["saved_ratio"] is before["mean_ttft_ms"] is None
        text = " ".join(f"The code of door {n} is {n * 37 % 1000}." for n in range(12))
        client.put("/v1/documents/handbook", json={"text": text})
        answers = [client.post("/v1/query", json=QUESTION).json() for _ in range(2)]
        stats = client.get("/v1/cache/stats").json()
    details = [a["usage"]["prompt_tokens_details"] for a in answers]
    assert stats["saved_tokens"] == sum(d["cached_tokens"] for d in details)
    assert stats["prompt_tokens"] == sum(a["usage"]["prompt_tokens"] for a in answers)
    assert stats["saved_ratio"] == pytest.approx(stats["saved_tokens"] / stats["prompt_tokens"])
    assert stats["hit_ratio"] == pytest.approx(sum(stats["hits"].values()) / stats["lookups"])
    assert stats["tiers"]["host"]["max_bytes"] == 1 << 20
    assert stats["tiers"]["disk"]["entries"] == stats["prefills"] > 0
    assert stats["requests"] == {"length": 2} or sum(stats["requests"].values()) == 2
    assert stats["mean_ttft_ms"] > 0
    assert stats["fidelity"] is None
