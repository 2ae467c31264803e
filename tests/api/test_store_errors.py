"""A store that is full, or open for reading alone: the right code, and hits are served on."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import httpx
import pytest
from fastapi import FastAPI

from chunkcache.errors import StoreFullError
from chunkcache.runtime import Runtime
from chunkcache.store.transaction import Database
from chunkcache_api.app import create_app

QUERY = {"query": "Which code?", "document_ids": ["kept"], "max_tokens": 2}
TEXT = "The code of the red door is 4017, and the light goes on at dusk. "


@pytest.fixture
def full(make_runtime: Callable[..., Runtime]) -> Iterator[Runtime]:
    """A runtime over a store with one document and no more room."""
    with make_runtime(store_max_bytes=16 << 20) as runtime:
        from chunkcache.chunk_cache import ChunkCache

        ChunkCache(runtime).put("kept", TEXT)
        for num_bytes in (1 << 20, 1 << 16, 1 << 12, 200):
            number = 0
            while True:
                name, value = b"filler/%d/%d" % (num_bytes, number), b"x" * num_bytes
                try:
                    runtime.env.update(lambda txn: txn.put(Database.MANIFEST, name, value))  # noqa: B023
                except StoreFullError:
                    break
                number += 1
        yield runtime


def test_a_full_store_answers_507_and_serves_its_hits(
    full: Runtime, serve: Callable[[FastAPI], AbstractContextManager[httpx.Client]]
) -> None:
    with serve(create_app(full)) as client:
        for _ in range(2):
            refused = client.put("/v1/documents/more", json={"text": TEXT * 40})
            assert refused.status_code == 507
            error = refused.json()["error"]
            assert error["code"] == "store_full"
            assert "limit" in error["message"]
        answer = client.post("/v1/query", json=QUERY)
        assert answer.status_code == 200
        assert answer.json()["chunkcache"]["documents"][0]["source"] in ("host", "disk")
        assert client.get("/readyz").status_code == 200
        # Removing works in a full store, and makes it take documents again.
        assert client.delete("/v1/documents/kept").status_code == 200
        full.env.update(
            lambda txn: [
                txn.delete(Database.MANIFEST, key)
                for key in [k for k, _ in txn.scan(Database.MANIFEST, b"filler/")]
            ],
            frees=True,
        )
        assert client.put("/v1/documents/more", json={"text": TEXT * 40}).status_code == 201


def test_documents_may_expire(client: httpx.Client) -> None:
    body = {"text": TEXT, "ttl_seconds": 3600}
    assert client.put("/v1/documents/short", json=body).status_code == 201
    expires_at = client.get("/v1/documents/short").json()["expires_at"]
    assert expires_at > 1.7e9
    listed = client.get("/v1/documents", params={"limit": 1000}).json()["data"]
    assert [d["expires_at"] for d in listed if d["id"] == "short"] == [expires_at]
    assert client.put("/v1/documents/short", json={"text": TEXT}).status_code == 200
    assert client.get("/v1/documents/short").json()["expires_at"] is None


@pytest.mark.parametrize(
    "fields",
    [
        {"ttl_seconds": 0},
        {"ttl_seconds": -5},
        {"expires_at": 12.0},
        {"expires_at": 4e9, "ttl_seconds": 5},
        {"ttl_seconds": "1h"},
    ],
)
def test_an_expiry_that_is_none(client: httpx.Client, fields: dict[str, object]) -> None:
    response = client.put("/v1/documents/never", json={"text": TEXT} | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("ttl_seconds", "expires_at")
    assert client.get("/v1/documents/never").status_code == 404
