"""``POST /v1/search``, and filters of ``POST /v1/query``."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from chunkcache.runtime import Runtime
from chunkcache_api.app import create_app
from chunkcache_retriever.retriever import Retriever
from chunkcache_retriever.testing import FixedEmbedder

TEXTS = {
    "pump": ("The pump leaks at the valve.", {"year": 2023, "tags": ["water"]}),
    "fan": ("The fan is loud at night.", {"year": 2024}),
    "manual": ("Turn the valve to the left.", {}),
}


@pytest.fixture
def client(runtime: Runtime, serve) -> Iterator[httpx.Client]:
    app = create_app(runtime, retriever_factory=lambda c: Retriever(c, FixedEmbedder()))
    with serve(app) as opened:
        for name, (text, metadata) in TEXTS.items():
            body = {"text": text, "metadata": metadata}
            opened.put(f"/v1/documents/{name}", json=body).raise_for_status()
        yield opened
        for name in TEXTS:
            opened.delete(f"/v1/documents/{name}").raise_for_status()


def search(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    response = client.post("/v1/search", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["object"] == "list"
    return response.json()["data"]


def eq(key: str, value: Any) -> dict[str, Any]:
    return {"type": "eq", "key": key, "value": value}


def test_passages_with_their_places(client: httpx.Client) -> None:
    hits = search(client, query="valve of the pump", top_k=2)
    assert [h["document_id"] for h in hits] == ["pump", "manual"]
    first = hits[0]
    assert (first["chunk_index"], first["also_in"]) == (0, [])
    assert first["metadata"] == TEXTS["pump"][1]
    assert first["text"] == TEXTS["pump"][0][first["start"] : first["end"]]
    assert first["score"] > hits[1]["score"] > 0


def test_filters(client: httpx.Client) -> None:
    assert [h["document_id"] for h in search(client, query="the", filters=eq("year", 2024))] == [
        "fan"
    ]
    either = {"type": "or", "filters": [eq("tags", "water"), eq("year", 2024)]}
    assert {h["document_id"] for h in search(client, query="the", filters=either)} == {
        "pump",
        "fan",
    }
    assert search(client, query="the", filters=eq("year", 1900)) == []


def test_a_query_retrieves_through_its_filter(client: httpx.Client) -> None:
    body = {"query": "valve", "top_k": 3, "filters": eq("year", 2024), "max_tokens": 1}
    response = client.post("/v1/query", json=body)
    assert response.status_code == 200, response.text
    assert [d["id"] for d in response.json()["chunkcache"]["documents"]] == ["fan"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/search", {"query": ""}, "query"),
        ("/v1/search", {"query": "q", "top_k": 0}, "top_k"),
        ("/v1/search", {"query": "q", "limit": 1}, "limit"),
        ("/v1/search", {"query": "q", "filters": {"type": "like"}}, "filters.type"),
        ("/v1/search", {"query": "q", "filters": []}, "filters"),
        ("/v1/query", {"query": "q", "top_k": 1, "filters": {"type": "eq"}}, "filters.key"),
        ("/v1/query", {"query": "q", "document_ids": ["pump"], "filters": eq("a", 1)}, "filters"),
    ],
)
def test_what_is_wrong_is_said(client: httpx.Client, path: str, body: Any, param: str) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_server_without_a_retriever_says_so(runtime: Runtime, serve) -> None:
    with serve(create_app(runtime)) as client:
        response = client.post("/v1/search", json={"query": "q"})
        assert (response.status_code, response.json()["error"]["code"]) == (
            400,
            "unsupported_parameter",
        )
