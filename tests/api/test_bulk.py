"""``POST /v1/documents`` and ``POST /v1/documents/lookup``."""

import json
from typing import Any

import httpx
import pytest

from chunkcache.chunk_cache import ChunkCache
from chunkcache.errors import StoreFullError
from chunkcache.runtime import Runtime
from chunkcache.settings import load_settings
from chunkcache_api.app import create_app

NDJSON = {"content-type": "application/x-ndjson"}


def post(client: httpx.Client, *lines: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Results of the lines, and what became of all of them."""
    data = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    response = client.post("/v1/documents", content=data, headers=NDJSON)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == NDJSON["content-type"]
    *results, last = map(json.loads, response.text.splitlines())
    return results, last


def refusal(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def test_each_line_has_its_result(client: httpx.Client) -> None:
    one, two = {"id": "b1", "text": "The key is blue."}, {"id": "b2", "text": "The door is red."}
    results, last = post(client, one, two, "", one | {"metadata": {"n": 1}})
    assert [(r["line"], r["id"], r["status"]) for r in results] == [
        (1, "b1", "created"),
        (2, "b2", "created"),
        (4, "b1", "updated"),
    ]
    assert results[0]["prefilled_chunks"] == results[0]["num_chunks"] == 1
    assert [r["progress"] for r in results] == sorted(r["progress"] for r in results)
    assert results[-1]["progress"] == 1.0
    counted = {k: last[k] for k in ("documents", "created", "updated", "unchanged", "failed")}
    assert counted == {"documents": 3, "created": 2, "updated": 1, "unchanged": 0, "failed": 0}
    assert (last["object"], last["interrupted"], last["error"]) == (
        "chunkcache.bulk_result",
        False,
        None,
    )
    assert post(client, two)[1]["unchanged"] == 1
    assert client.get("/v1/documents/b1").json()["metadata"] == {"n": 1}


def test_lines_that_cannot_be_taken_are_reported_and_the_others_go_on(
    client: httpx.Client,
) -> None:
    """F05, L11 and I03 within one body: a bad neighbour harms nobody."""
    results, last = post(
        client,
        {"id": "ok1", "text": "First."},
        "{not json",
        "[1]",
        {"text": "no id"},
        {"id": "", "text": "x"},
        {"id": "x" * 2001, "text": "x"},
        {"id": "blank", "text": " \n"},
        {"id": "x", "text": 5},
        {"id": "x", "text": "x", "nonsense": 1},
        {"id": "x", "text": "x", "digest": "0" * 64},
        '{"id": "x", "text": "\\ud800"}',
        {"id": "x", "text": "x", "metadata": {"k": 1}, "ttl_seconds": -1},
        '{"id": "deep", "text": "x", "metadata": ' + "[" * 5_000 + "]" * 5_000 + "}",
        {"id": "ok2", "text": "Last."},
    )
    codes = [r.get("error", {}).get("code") for r in results]
    assert codes == [
        None,
        "invalid_value",
        "invalid_value",
        "invalid_value",
        "invalid_value",
        "invalid_value",
        "empty_document",
        "invalid_value",
        "unsupported_parameter",
        "digest_mismatch",
        "invalid_value",
        "invalid_value",
        "invalid_value",
        None,
    ]
    assert all(r["status"] == "failed" for r, c in zip(results, codes, strict=True) if c)
    assert (last["created"], last["failed"], last["interrupted"]) == (2, 12, False)
    for name in ("ok1", "ok2"):
        assert client.get(f"/v1/documents/{name}").status_code == 200
    for name in ("x", "blank", "deep"):
        assert client.get(f"/v1/documents/{name}").status_code == 404


def test_no_lines_change_nothing(client: httpx.Client) -> None:
    assert post(client)[1]["documents"] == 0
    assert post(client, "", "  ", "\r")[1]["documents"] == 0


def test_line_ends_of_all_kinds(client: httpx.Client) -> None:
    data = b'{"id":"w1","text":"One."}\r\n\r\n{"id":"w2","text":"Two."}'
    response = client.post("/v1/documents", content=data, headers=NDJSON)
    assert [json.loads(r).get("id") for r in response.text.splitlines()] == ["w1", "w2", None]


def test_bodies_that_are_refused(client: httpx.Client) -> None:
    assert refusal(client.post("/v1/documents", json={"id": "x", "text": "x"}))[:2] == (
        415,
        "unsupported_media_type",
    )
    large = client.post("/v1/documents", content=b"x" * (2 << 20), headers=NDJSON)
    assert refusal(large)[:2] == (413, "body_too_large")


def test_a_store_that_fails_ends_the_run(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, calls = ChunkCache.put, []

    def failing(self: ChunkCache, document_id: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(document_id)
        if document_id == "full":
            raise StoreFullError("no room")
        return put(self, document_id, *args, **kwargs)

    monkeypatch.setattr(ChunkCache, "put", failing)
    fits, full, late = ({"id": n, "text": n} for n in ("fits", "full", "late"))
    results, last = post(client, fits, full, late)
    assert [r["status"] for r in results] == ["created", "failed"]
    assert (last["interrupted"], last["error"]["code"]) == (True, "store_full")
    assert calls == ["fits", "full"]
    data = json.dumps(full)
    refused = client.post("/v1/documents", content=data, headers=NDJSON)
    assert refusal(refused)[:2] == (507, "store_full")


def test_a_store_for_reading_alone_refuses_all_lines(
    make_runtime, serve, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with make_runtime() as runtime:
        settings = runtime.settings
    read_only = load_settings(**settings.model_dump() | {"read_only": True})
    with Runtime.open(read_only) as runtime, serve(create_app(runtime)) as client:
        data = json.dumps({"id": "x", "text": "x"})
        for response in (
            client.post("/v1/documents", content=data, headers=NDJSON),
            client.post(
                "/v1/files", files={"file": ("a.txt", b"x")}, data={"purpose": "user_data"}
            ),
            client.post("/v1/vector_stores", json={}),
            client.post("/v1/cache/gc", json={}),
        ):
            assert refusal(response)[:2] == (403, "store_read_only")


def test_lookup_says_what_is_cached_where(client: httpx.Client, runtime: Runtime) -> None:
    text = " ".join(f"Lamp {n} burns at berth {n * 7 % 50}." for n in range(10))
    put = client.put("/v1/documents/lamps", json={"text": text}).json()
    body = {"document_ids": ["lamps", "none"], "texts": [text, "Nobody has sent this."]}
    found = client.post("/v1/documents/lookup", json=body).json()
    lamps, none = found["data"]
    assert (lamps["id"], lamps["found"], lamps["cached"]) == ("lamps", True, True)
    assert lamps["cached_chunks"] == lamps["chunks"] == put["num_chunks"]
    assert lamps["cached_tokens"] == lamps["tokens"] == put["num_tokens"]
    assert lamps["tiers"]["host"]["tokens"] == put["num_tokens"]
    assert none == {"id": "none", "object": "chunkcache.lookup", "found": False}
    known, unknown = found["texts"]
    assert (known["cached"], known["cached_tokens"]) == (True, put["num_tokens"])
    assert (unknown["cached"], unknown["cached_tokens"]) == (False, 0)
    before = runtime.stack.stats()
    client.post("/v1/documents/lookup", json=body).raise_for_status()
    assert runtime.stack.stats() == before, "a lookup loads nothing"

    client.post("/v1/cache/clear", json={}).raise_for_status()
    (lamps,) = client.post("/v1/documents/lookup", json={"document_ids": ["lamps"]}).json()["data"]
    assert lamps["cached"]
    assert lamps["tiers"]["host"] == {"chunks": 0, "tokens": 0}
    assert lamps["tiers"]["disk"]["tokens"] == put["num_tokens"]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "invalid_value", "document_ids"),
        ({"document_ids": [1]}, "invalid_value", "document_ids[0]"),
        ({"document_ids": ["x"] * 1001}, "invalid_value", "document_ids"),
        ({"texts": [" "]}, "empty_document", "texts[0]"),
        ({"nonsense": 1}, "unsupported_parameter", "nonsense"),
    ],
)
def test_lookups_that_are_refused(
    client: httpx.Client, body: dict[str, Any], code: str, param: str
) -> None:
    assert refusal(client.post("/v1/documents/lookup", json=body)) == (400, code, param)
