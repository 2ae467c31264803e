"""``POST /v1/chat/completions`` beside what OpenAI's client shows: documents, turns, refusals."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from chunkcache.chunk_cache import ChunkCache
from chunkcache.planning import AskOptions, ChatTurn, DocumentRef
from chunkcache.runtime import Runtime

PATH = "/v1/chat/completions"
QUESTION = "What is the code of door 3?"
BODY: dict[str, Any] = {
    "model": "tiny-llama",
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 4,
    "temperature": 0,
}
NEW_TEXT = "The lamp is lit at dusk by Vera."

pytestmark = pytest.mark.usefixtures("handbook")


def ask(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post(PATH, json=BODY | fields)
    assert response.status_code == 200, response.text
    return response.json()


def user(*parts: Any) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return [{"role": "user", "content": content}]


def file_part(document_id: str) -> dict[str, Any]:
    return {"type": "file", "file": {"file_id": document_id}}


def refusal(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def sources(body: dict[str, Any]) -> dict[str, str]:
    return {d["id"]: d["source"] for d in body["chunkcache"]["documents"]}


def test_chunks_of_a_document_by_their_indexes(client: httpx.Client, runtime: Runtime) -> None:
    wanted = {"id": "handbook", "chunk_indexes": [0, 2]}
    part = {"type": "file", "file": {"file_id": "handbook", "chunk_indexes": [0, 2]}}
    ways = [ask(client, documents=[wanted]), ask(client, messages=user(part, QUESTION))]
    turn = ChatTurn(QUESTION, (DocumentRef("handbook", (0, 2)),))
    core = ChunkCache(runtime).chat([turn], AskOptions(max_tokens=4)).answer()
    for body in ways:
        assert body["choices"][0]["message"]["content"] == core.text
        assert body["chunkcache"]["documents"][0]["chunks"] == 2
        assert body["usage"]["prompt_tokens"] == core.usage["prompt_tokens"]
    for fields, param in (
        ({"documents": [wanted | {"text": "x"}]}, "documents[0].chunk_indexes"),
        ({"documents": [wanted | {"chunk_indexes": [-1]}]}, "documents[0].chunk_indexes[0]"),
    ):
        response = client.post(PATH, json=BODY | fields)
        assert refusal(response) == (400, "invalid_value", param)


def test_a_message_may_be_put_as_a_question(client: httpx.Client, runtime: Runtime) -> None:
    body = ask(client, documents=[{"id": "handbook"}], chunkcache={"as_question": True})
    core = ChunkCache(runtime).answer(QUESTION, ["handbook"], max_tokens=4)
    assert body["choices"][0]["message"]["content"] == core.text
    plain = ask(client, documents=[{"id": "handbook"}])
    assert body["usage"]["prompt_tokens"] == core.usage["prompt_tokens"]
    assert body["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]


def test_three_ways_to_name_a_document_are_one_prompt(client: httpx.Client) -> None:
    text = client.get("/v1/documents/handbook").json()["text"]
    ways = [
        ask(client, documents=[{"id": "handbook"}]),
        ask(client, messages=user(file_part("handbook"), QUESTION)),
        ask(client, messages=user(QUESTION, file_part("handbook"))),
        ask(client, documents=[{"id": "any", "text": text}]),
        ask(client, messages=user(text, QUESTION)),
    ]
    assert len({w["choices"][0]["message"]["content"] for w in ways}) == 1
    assert len({w["usage"]["prompt_tokens"] for w in ways}) == 1
    assert [list(sources(w)) for w in ways] == [
        *([["handbook"]] * 3),
        ["any"],
        ["messages[0].content[0]"],
    ]
    assert {s for w in ways for s in sources(w).values()} <= {"host", "disk"}


def test_a_new_text_is_prefilled_once_and_is_no_document(
    client: httpx.Client, runtime: Runtime
) -> None:
    before, generation = runtime.stack.stats(), ChunkCache(runtime).catalog.generation()
    first = ask(client, messages=user(NEW_TEXT, QUESTION))
    again = ask(client, documents=[{"id": "lamp", "text": NEW_TEXT}])
    after = runtime.stack.stats()
    assert (list(sources(first).values()), list(sources(again).values())) == (
        ["computed"],
        ["host"],
    )
    assert first["usage"]["prompt_tokens_details"]["cache_write_tokens"] > 0
    assert first["chunkcache"]["warnings"] == []
    assert after.prefills - before.prefills == 1
    assert after.entries["disk"] == before.entries["disk"]
    assert ChunkCache(runtime).catalog.generation() == generation
    assert client.get("/v1/documents/lamp").status_code == 404
    same = [c["choices"][0]["message"]["content"] for c in (first, again)]
    assert same[0] == same[1]


def test_a_text_that_becomes_a_document_goes_with_it(
    client: httpx.Client, runtime: Runtime
) -> None:
    text = "The mast is nine metres high."
    ask(client, messages=user(text, QUESTION))
    put = client.put("/v1/documents/mast", json={"text": text}).json()
    assert put["prefilled_chunks"] == 0
    plan = ChunkCache(runtime).plan(QUESTION, ["mast"], AskOptions())
    (key,) = {i.key() for i in plan.identities}
    assert runtime.stack.contains(key)
    client.delete("/v1/documents/mast")
    assert runtime.stack.tier_of(key) is None


def test_what_to_do_about_a_text_that_is_not_cached(client: httpx.Client) -> None:
    text = "The bell of the chapel was cast in the year 1711."
    asked = BODY | {"messages": user(text, QUESTION)}
    missed = client.post(PATH, json=asked | {"chunkcache": {"on_miss": "error"}})
    assert refusal(missed) == (422, "cache_miss", "documents")
    skipped = ask(client, **asked | {"chunkcache": {"on_miss": "skip"}})
    assert [w["code"] for w in skipped["chunkcache"]["warnings"]] == ["chunk_skipped"]
    plain = ask(client)
    assert skipped["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert skipped["choices"] == plain["choices"]


def test_a_dry_run_tells_the_plan(client: httpx.Client, runtime: Runtime) -> None:
    fields = {"messages": user(file_part("handbook"), "Vera keeps the lamp.", QUESTION)}
    before = runtime.stack.stats().lookups
    plan = ask(client, **fields, chunkcache={"dry_run": True})
    assert runtime.stack.stats().lookups == before
    real = ask(client, **fields)
    assert plan["object"] == "chunkcache.plan"
    assert plan["prompt_tokens"] == real["usage"]["prompt_tokens"]
    assert plan["policy"] == real["chunkcache"]["policy"]
    stored, new = plan["documents"]
    assert stored["cached_chunks"] == stored["chunks"] > 1
    assert (new["cached_chunks"], new["chunks"]) == (0, 1)
    again = ask(client, **fields, chunkcache={"dry_run": True})
    assert again["documents"][1]["cached_chunks"] == 1


def test_verify_and_options_are_as_in_a_query(client: httpx.Client) -> None:
    options = {"policy": "query", "recompute_ratio": 0.4, "layers": "all", "verify": True}
    body = ask(client, documents=[{"id": "handbook"}], chunkcache=options)
    assert body["chunkcache"]["policy"].startswith("query(0.4, layers=all")
    assert body["chunkcache"]["verify"]["kl_first"] >= 0


def test_documents_join_at_any_turn(client: httpx.Client, runtime: Runtime) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Good day."},
        *user(file_part("handbook"), QUESTION),
        {"role": "assistant", "content": "It is 111."},
        {"role": "user", "content": "Are you sure?"},
    ]
    turns = [
        ChatTurn("Hello.", (), "Good day."),
        ChatTurn(QUESTION, ["handbook"], "It is 111."),
        ChatTurn("Are you sure?"),
    ]
    body = ask(client, messages=messages)
    same = ChunkCache(runtime).chat(turns, AskOptions(system="Be brief.", max_tokens=4)).answer()
    assert body["choices"][0]["message"]["content"] == same.text
    assert body["usage"]["prompt_tokens_details"]["fused_tokens"] > 0


def test_an_account_of_a_request_holds_no_text(client: httpx.Client) -> None:
    labels = {"user": "u-17", "metadata": {"trace": "t-4"}}
    body = ask(client, messages=user(NEW_TEXT, QUESTION), **labels)
    account = client.get(f"/v1/requests/{body['id']}")
    record = account.json()
    assert record["status"] == "completed"
    assert (record["user"], record["metadata"]) == ("u-17", {"trace": "t-4"})
    assert record["usage"] == body["usage"]
    assert record["chunkcache"]["timings"] == body["chunkcache"]["timings"]
    assert record["plan"]["documents"][0]["id"] == "messages[0].content[0]"
    assert "Vera" not in account.text
    assert "door" not in account.text
    query = client.post(
        "/v1/query", json={"query": QUESTION, "document_ids": ["handbook"], "max_tokens": 2}
    ).json()
    assert client.get(f"/v1/requests/{query['id']}").json()["endpoint"] == "/v1/query"
    verified = ask(client, documents=[{"id": "handbook"}], chunkcache={"verify": True})
    verify = verified["chunkcache"]["verify"]
    account = client.get(f"/v1/requests/{verified['id']}").json()
    assert verify.pop("full_answer")
    assert account["chunkcache"]["verify"] == verify
    assert refusal(client.get("/v1/requests/ans_no")) == (404, "request_not_found", "id")


def test_the_server_timing_header(client: httpx.Client) -> None:
    header = client.post(PATH, json=BODY).headers["server-timing"]
    assert [p.partition(";dur=")[0] for p in header.split(", ")] == [
        *("queue", "load", "prefill", "place", "probe", "recompute", "ttft", "decode")
    ]
    with client.stream("POST", PATH, json=BODY | {"stream": True}) as response:
        assert response.headers["server-timing"].startswith("plan;dur=")
        assert response.read().endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"store": True}, "store"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"prompt_logprobs": 5}, "prompt_logprobs"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"top_k": 0}, "top_k"),
        ({"tenant": "other"}, "tenant"),
        ({"cache_salt": "x"}, "cache_salt"),
        ({"chunkcache": {"salt": "x"}}, "chunkcache.salt"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "name": "a"}]}, "messages[0].name"),
        (
            {"messages": user({"type": "image_url", "image_url": {"url": "x"}})},
            "messages[0].content[0].image_url",
        ),
        ({"messages": user({"type": "input_audio"})}, "messages[0].content[0].type"),
        (
            {"messages": user({"type": "file", "file": {"file_data": "x"}})},
            "messages[0].content[0].file.file_data",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "zzz"}},
                }
            },
            "response_format",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    client: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    """D14, A08 and X01: nothing is ignored, a salt in the body least of all."""
    response = client.post(PATH, json=BODY | fields)
    assert refusal(response) == (400, "unsupported_parameter", param)


def test_values_that_ask_for_nothing_are_accepted(client: httpx.Client) -> None:
    fields = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "tools": [],
        "store": False,
        "top_p": None,
        "stop": None,
        "stream": None,
        "n": 1,
        "service_tier": "auto",
        "audio": None,
        "response_format": {"type": "text"},
    }
    assert refusal(client.post(PATH, json=BODY | {"frequency_penalty": False}))[0] == 400
    assert ask(client, **fields)["choices"] == ask(client)["choices"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*user("a"), *user("b")]}, "messages[1].role"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [*user("a"), {"role": "assistant", "content": "b"}]},
            "messages[1].role",
        ),
        ({"messages": user({"type": "text"})}, "messages[0].content[0].text"),
        ({"messages": user({"type": "file", "file": {}})}, "messages[0].content[0].file.file_id"),
        ({"messages": user("x" * 300_000)}, "messages[0].content[0].text"),
        ({"messages": user(" \n", "a")}, "messages[0].content[0].text"),
        ({"documents": [{"text": "x"}]}, "documents[0].id"),
        ({"documents": [{"id": "a", "text": "\x00"}]}, "documents[0].text"),
        ({"documents": [{"id": "handbook"}] * 70}, "documents"),
        ({"n": 0}, "n"),
        ({"n": 5}, "n"),
        ({"n": 10**12}, "n"),
        ({"n": 2, "chunkcache": {"verify": True}}, "chunkcache.verify"),
        ({"user": "x" * 600}, "user"),
        ({"safety_identifier": "x" * 600}, "safety_identifier"),
        ({"metadata": {"a": "x" * 600}}, "metadata.a"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"stop": "x" * 1_000}, "stop"),
        ({"stop": 5}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "chunkcache": {"dry_run": True}}, "stream"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"seed": 1 << 70}, "seed"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"model": None}, "model"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(
    client: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    """A08."""
    response = client.post(PATH, json=BODY | fields)
    status, code, named = refusal(response)
    assert (status, named) == (400, param)
    assert code in ("invalid_value", "empty_document")


def test_a_conversation_over_the_context_is_refused(client: httpx.Client) -> None:
    response = client.post(PATH, json=BODY | {"documents": [{"id": "handbook"}] * 20})
    assert refusal(response) == (400, "context_length_exceeded", "documents")


@contextmanager
def _events(client: httpx.Client, **fields: Any) -> Iterator[list[Any]]:
    response = client.post(PATH, json=BODY | {"stream": True} | fields)
    frames = response.text.split("\n\n")[:-1]
    assert all(f.startswith("data: ") and "\n" not in f for f in frames)
    data = [f.removeprefix("data: ") for f in frames]
    yield [d if d == "[DONE]" else json.loads(d) for d in data]


def test_a_failure_behind_the_headers_is_the_last_event(
    client: httpx.Client, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A06: one of three answers fails, so the request does."""
    from chunkcache.engine.sampling import Sampler

    draw, draws = Sampler.draw, iter(range(10**9))

    def failing(self: Sampler, logits: Any) -> int:
        if next(draws) == 7:
            raise RuntimeError("broken at /secret/path")
        return draw(self, logits)

    monkeypatch.setattr(Sampler, "draw", failing)
    with _events(client, n=3, max_tokens=20) as events:
        assert events[-1]["error"]["code"] == "internal_error"
        assert "[DONE]" not in events
        assert "secret" not in json.dumps(events)
        name = events[0]["id"]
    assert client.get(f"/v1/requests/{name}").json()["status"] == "failed"
    with _events(client, n=3) as events:
        assert events[-1] == "[DONE]"
    assert runtime.engine.num_open_requests == 0
