"""Tenants over one runtime: nothing of one is ever another's."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chunkcache.chunk_cache import ChunkCache
from chunkcache.planning import DocumentRef
from chunkcache.runtime import Runtime
from chunkcache_api.app import create_app
from chunkcache_api.auth.api_key import SCOPES, make_key
from chunkcache_api.auth.key_ring import KeyRing
from chunkcache_api.auth.keys_file import change_keys
from chunkcache_api.service import NUM_SEARCH_THREADS

MakeRuntime = Callable[..., Runtime]
Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]
Ask = Callable[..., httpx.Response]

SECRET = "The vault opens with the word alabaster, and only on the first day of the month."
TENANTS = ("red", "blue")


class FirstDocuments:
    """Finds the tenant's first documents, whatever is asked."""

    def __init__(self, cache: ChunkCache) -> None:
        self._cache = cache

    def retrieve(self, query: str, top_k: int, filters: object = None) -> Sequence[DocumentRef]:
        return [DocumentRef(info.document_id) for info in self._cache.list(limit=top_k)]


@pytest.fixture(scope="module")
def as_tenant(runtime: Runtime, serve: Serve, tmp_path_factory: Any) -> Iterator[Ask]:
    """Calls a server with the key of a tenant."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    headers = {t: key_headers(path, t) for t in (*TENANTS, "green")}
    app = create_app(runtime, keys=KeyRing(path), retriever_factory=FirstDocuments)
    with serve(app) as client:
        yield lambda tenant, method, url, **kw: client.request(
            method, url, headers=headers[tenant], **kw
        )


def key_headers(path: Path, tenant: str) -> dict[str, str]:
    text, key = make_key(tenant, frozenset(SCOPES))
    change_keys(path, lambda keys: keys.update({key.key_id: key}))
    return {"authorization": f"Bearer {text}"}


def ask(document_id: str, **fields: Any) -> dict[str, Any]:
    return {
        "json": {"query": "Which word?", "document_ids": [document_id], "max_tokens": 1} | fields
    }


def chat(content: Any = "Which word?", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"json": {"model": "tiny-llama", "messages": messages, "max_tokens": 1} | fields}


def respond(content: Any) -> dict[str, Any]:
    given = [{"role": "user", "content": content}]
    return {"json": {"model": "tiny-llama", "input": given, "max_output_tokens": 1}}


def test_sets_jobs_and_lookups_are_the_tenants_own(as_tenant: Ask) -> None:
    as_tenant("red", "PUT", "/v1/documents/own", json={"text": SECRET}).raise_for_status()
    store = as_tenant("red", "POST", "/v1/vector_stores", json={"file_ids": ["own"]}).json()["id"]
    job = as_tenant("red", "POST", "/v1/precache", json={"document_ids": ["own"]}).json()["id"]
    as_tenant("green", "PUT", "/v1/documents/mine", json={"text": "Mine."}).raise_for_status()
    for method, url, body in (
        ("GET", f"/v1/vector_stores/{store}", None),
        ("DELETE", f"/v1/vector_stores/{store}", None),
        ("GET", f"/v1/vector_stores/{store}/files", None),
        ("GET", f"/v1/vector_stores/{store}/files/own", None),
        ("POST", f"/v1/vector_stores/{store}/files", {"file_id": "mine"}),
        ("GET", f"/v1/jobs/{job}", None),
        ("POST", f"/v1/jobs/{job}/cancel", None),
    ):
        theirs = as_tenant("green", method, url, json=body)
        assert theirs.status_code == 404, url
        assert theirs.json()["error"]["code"] in ("collection_not_found", "job_not_found")
    for url in ("/v1/files", "/v1/vector_stores", "/v1/jobs"):
        assert as_tenant("blue", "GET", url).json()["data"] == []
    wanted = {"document_ids": ["own"], "texts": [SECRET]}
    found = as_tenant("blue", "POST", "/v1/documents/lookup", json=wanted).json()
    assert found["data"] == [{"id": "own", "object": "chunkcache.lookup", "found": False}]
    assert (found["texts"][0]["cached"], found["texts"][0]["cached_tokens"]) == (False, 0)
    as_tenant("green", "DELETE", "/v1/documents/mine").raise_for_status()
    cleared = as_tenant("blue", "POST", "/v1/cache/clear", json={"tiers": ["disk"]}).json()
    assert cleared["dropped_entries"] == 0
    assert as_tenant("red", "POST", "/v1/documents/lookup", json=wanted).json()["data"][0]["cached"]


def test_another_tenants_document_is_none(as_tenant: Ask) -> None:
    """The answer is byte for byte that to an id which nobody has."""
    assert as_tenant("red", "PUT", "/v1/documents/vault", json={"text": SECRET}).status_code == 201
    calls: list[tuple[str, str, Callable[[str], dict[str, Any]]]] = [
        ("GET", "/v1/documents/{}", lambda name: {}),
        ("DELETE", "/v1/documents/{}", lambda name: {}),
        ("POST", "/v1/query", ask),
        ("POST", "/v1/query", lambda name: ask(name, stream=True)),
        ("POST", "/v1/query", lambda name: ask(name, chunkcache={"dry_run": True})),
        ("POST", "/v1/chat/completions", lambda name: chat(documents=[{"id": name}])),
        (
            "POST",
            "/v1/chat/completions",
            lambda name: chat(
                [{"type": "file", "file": {"file_id": name}}, {"type": "text", "text": "Which?"}]
            ),
        ),
        ("POST", "/v1/cache/pins", lambda name: {"json": {"document_ids": [name], "ttl_s": 9}}),
        (
            "POST",
            "/v1/cache/pins",
            lambda name: {"json": {"document_ids": [name], "next_use_s": 9}},
        ),
        ("DELETE", "/v1/cache/pins", lambda name: {"json": {"document_ids": [name]}}),
        ("GET", "/v1/files/{}", lambda name: {}),
        ("GET", "/v1/files/{}/content", lambda name: {}),
        ("DELETE", "/v1/files/{}", lambda name: {}),
        ("POST", "/v1/vector_stores", lambda name: {"json": {"file_ids": [name]}}),
        (
            "POST",
            "/v1/responses",
            lambda name: respond([{"type": "input_file", "file_id": name}]),
        ),
    ]
    for method, url, fields in calls:
        theirs = as_tenant("blue", method, url.format("vault"), **fields("vault"))
        nobodys = as_tenant("green", method, url.format("vault"), **fields("vault"))
        assert theirs.status_code == 404
        assert theirs.json()["error"]["code"] == "document_not_found"
        assert theirs.content == nobodys.content
        assert set(theirs.headers) == set(nobodys.headers)
    assert as_tenant("blue", "GET", "/v1/documents").json()["data"] == []
    assert as_tenant("red", "GET", "/v1/documents/vault").json()["text"] == SECRET


def test_X01_the_same_text_is_computed_anew(as_tenant: Ask) -> None:
    """Storing, or sending, what another tenant has stored shows nothing of it."""
    as_tenant("red", "PUT", "/v1/documents/x01", json={"text": SECRET})
    first = as_tenant("blue", "PUT", "/v1/documents/mine", json={"text": SECRET}).json()
    assert first["status"] == "created"
    assert first["reused_chunks"] == 0
    assert first["prefilled_chunks"] == first["num_chunks"]
    body = {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": "Which word?"}],
        "documents": [{"id": "guess", "text": SECRET}],
        "max_tokens": 1,
    }
    answer = as_tenant("green", "POST", "/v1/chat/completions", json=body).json()
    assert [d["source"] for d in answer["chunkcache"]["documents"]] == ["computed"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for salt in ({"tenant": "red"}, {"cache_salt": "red"}, {"namespace": "red"}):
        refused = as_tenant("blue", "POST", "/v1/query", **ask("x01", **salt))
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            400,
            "unsupported_parameter",
        )


def test_accounts_of_requests_are_the_tenants_own(as_tenant: Ask) -> None:
    as_tenant("red", "PUT", "/v1/documents/account", json={"text": SECRET})
    name = as_tenant("red", "POST", "/v1/query", **ask("account")).json()["id"]
    assert as_tenant("red", "GET", f"/v1/requests/{name}").status_code == 200
    theirs = as_tenant("blue", "GET", f"/v1/requests/{name}")
    assert theirs.status_code == 404
    assert theirs.json()["error"]["code"] == "request_not_found"


def test_retrieval_finds_the_tenants_own(as_tenant: Ask) -> None:
    as_tenant("red", "PUT", "/v1/documents/a-red", json={"text": SECRET})
    as_tenant("green", "PUT", "/v1/documents/a-green", json={"text": "The lamp is green."})
    body = {"query": "Which?", "top_k": 5, "max_tokens": 1}
    answer = as_tenant("green", "POST", "/v1/query", json=body).json()
    assert [c["document_id"] for c in answer["citations"]] == ["a-green"]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(TENANTS),
        st.sampled_from(["put", "get", "delete", "list", "ask"]),
        st.sampled_from(["a", "b"]),
        st.sampled_from(["one", "two"]),
    ),
    max_size=12,
)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(operations=OPERATIONS)
def test_each_tenant_sees_a_world_of_its_own(
    as_tenant: Ask, operations: list[tuple[str, str, str, str]]
) -> None:
    """Random operations of two tenants on the same ids and texts, against one model for each."""
    for tenant in TENANTS:
        for info in as_tenant(tenant, "GET", "/v1/documents").json()["data"]:
            as_tenant(tenant, "DELETE", f"/v1/documents/{info['id']}")
    worlds: dict[str, dict[str, str]] = {tenant: {} for tenant in TENANTS}
    for tenant, operation, name, word in operations:
        world, url = worlds[tenant], f"/v1/documents/{name}"
        text = f"The word of the day is {word}, whoever asks for it at the gate."
        if operation == "put":
            put = as_tenant(tenant, "PUT", url, json={"text": text}).json()
            known = text in world.values()
            old = world.get(name)
            expected = "created" if old is None else "unchanged" if old == text else "updated"
            assert put["status"] == expected
            assert (put["prefilled_chunks"] == 0) == known
            world[name] = text
        elif operation == "get":
            got = as_tenant(tenant, "GET", url)
            assert got.status_code == (200 if name in world else 404)
            assert got.json().get("text") == world.get(name)
        elif operation == "delete":
            gone = as_tenant(tenant, "DELETE", url)
            assert gone.status_code == (200 if name in world else 404)
            world.pop(name, None)
        elif operation == "list":
            listed = as_tenant(tenant, "GET", "/v1/documents").json()["data"]
            assert [info["id"] for info in listed] == sorted(world)
        else:
            answer = as_tenant(tenant, "POST", "/v1/query", **ask(name))
            assert answer.status_code == (200 if name in world else 404)
            if name in world:
                (document,) = answer.json()["chunkcache"]["documents"]
                assert document["source"] in ("host", "disk")


def test_no_tenant_waits_for_another_s_searches(
    runtime: Runtime, serve: Serve, tmp_path: Path
) -> None:
    """However many of one's are under way, and wait."""
    path = tmp_path / "keys.json"
    red, blue = key_headers(path, "red"), key_headers(path, "blue")
    num_begun, may_end = threading.Semaphore(0), threading.Event()

    class SlowForRed(FirstDocuments):
        def search(self, query: str, top_k: int, filters: object = None) -> Sequence[Any]:
            if query == "red":
                num_begun.release()
                may_end.wait()
            return []

    app = create_app(runtime, keys=KeyRing(path), retriever_factory=SlowForRed)
    with serve(app) as client, ThreadPoolExecutor(NUM_SEARCH_THREADS) as threads:

        def search(headers: dict[str, str], query: str) -> int:
            body = {"query": query, "top_k": 1}
            return client.post("/v1/search", json=body, headers=headers, timeout=20).status_code

        slow = [threads.submit(search, red, "red") for _ in range(NUM_SEARCH_THREADS)]
        try:
            for _ in slow:
                num_begun.acquire()
            assert search(blue, "blue") == 200
        finally:
            may_end.set()
        assert [s.result() for s in slow] == [200] * NUM_SEARCH_THREADS


def test_a_tenant_over_its_quota_is_refused_alone(
    make_runtime: MakeRuntime, serve: Serve, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    red, blue = key_headers(path, "red"), key_headers(path, "blue")
    with (
        make_runtime(tenant_max_bytes=200_000) as runtime,
        serve(create_app(runtime, keys=KeyRing(path))) as client,
    ):
        put = [
            client.put(f"/v1/documents/{i}", json={"text": f"{SECRET} {i}" * 3}, headers=red)
            for i in range(8)
        ]
        statuses = [r.status_code for r in put]
        num_kept = statuses.count(201)
        assert 0 < num_kept < 8
        assert statuses == [201] * num_kept + [507] * (8 - num_kept)
        assert put[-1].json()["error"]["code"] == "quota_exceeded"
        assert client.get(f"/v1/documents/{num_kept}", headers=red).status_code == 404
        body = {"query": "Which?", "document_ids": ["0"], "max_tokens": 1}
        assert client.post("/v1/query", json=body, headers=red).status_code == 200
        theirs = client.put("/v1/documents/x", json={"text": SECRET}, headers=blue)
        assert theirs.status_code == 201
        assert client.delete("/v1/documents/0", headers=red).status_code == 200
        again = client.put("/v1/documents/0", json={"text": f"{SECRET} 0" * 3}, headers=red)
        assert again.status_code == 201
