"""API keys in front of the routes: who is let in, to what, and what changes while it runs."""

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from prometheus_client.parser import text_string_to_metric_families

from chunkcache.errors import InvalidValueError
from chunkcache.runtime import Runtime
from chunkcache_api.app import create_app
from chunkcache_api.auth.access import ANYBODY, ROUTE_SCOPES
from chunkcache_api.auth.api_key import ApiKey, Scope, make_key
from chunkcache_api.auth.key_ring import KeyRing
from chunkcache_api.auth.keys_file import change_keys, read_keys
from chunkcache_api.errors import KeysFileError

Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]
QUERY = {"query": "Who?", "document_ids": ["note"], "max_tokens": 1}
REQUESTS = {
    ("POST", "/v1/query"): QUERY,
    ("POST", "/v1/chat/completions"): {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": "Who?"}],
        "max_tokens": 1,
    },
    ("PUT", "/v1/documents/{id:opaque}"): {"text": "The baker."},
}


@dataclass(frozen=True)
class Keys:
    """A file of keys, and what it takes to change it."""

    path: Path

    def create(
        self, tenant: str, *scopes: Scope, lifetime_seconds: float | None = None
    ) -> dict[str, str]:
        """Headers of a new key."""
        text, key = make_key(tenant, frozenset(scopes), lifetime_seconds=lifetime_seconds)
        change_keys(self.path, lambda keys: keys.update({key.key_id: key}))
        return {"authorization": f"Bearer {text}"}

    def revoke_all(self) -> None:
        change_keys(self.path, lambda keys: keys.clear())


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    keys = Keys(tmp_path / "keys" / "keys.json")
    keys.create("somebody", "admin")
    return keys


@pytest.fixture
def guarded(runtime: Runtime, serve: Serve, keys: Keys) -> Iterator[httpx.Client]:
    """A server that wants keys."""
    with serve(create_app(runtime, keys=KeyRing(keys.path, is_required=True))) as client:
        yield client


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    found = set()
    for context in iter_route_contexts(app.routes):
        assert context.path is not None
        found |= {(m, context.path) for m in (context.methods or ()) if m != "HEAD"}
    return found


def test_every_route_states_its_scope(runtime: Runtime) -> None:
    assert routes_of(create_app(runtime)) == set(ROUTE_SCOPES)


def test_only_these_routes_are_open() -> None:
    is_open = {path for (_, path), scopes in ROUTE_SCOPES.items() if scopes == ANYBODY}
    assert is_open == {
        "/",
        "/web/{name}",
        "/livez",
        "/readyz",
        "/health",
        "/version",
        "/openapi.json",
    }


def test_each_route_wants_its_scope(guarded: httpx.Client, keys: Keys) -> None:
    """Without a key 401, with the others' scopes 403, with one of its own neither."""
    of_scope = {scope: keys.create("t", scope) for scope in ("query", "ingest", "admin")}
    for (method, path), scopes in ROUTE_SCOPES.items():
        url = path.replace("{id:opaque}", "note").replace("{id}", "req")
        url = url.replace("{model:opaque}", "tiny-llama").replace("{vector_store_id}", "vs_no")
        body = REQUESTS.get((method, path))

        def call(headers: dict[str, str], m: str = method, u: str = url, b: object = body) -> int:
            return guarded.request(m, u, json=b, headers=headers).status_code

        assert (call({}) == 401) == (scopes != ANYBODY), path
        for scope, headers in of_scope.items():
            is_allowed = scopes == ANYBODY or scope in scopes
            status = call(headers)
            assert status != 401, (path, scope)
            assert (status == 403) == (not is_allowed), (path, scope)


def test_a_refusal_says_what_is_missing(guarded: httpx.Client, keys: Keys) -> None:
    missing = guarded.post("/v1/query", json=QUERY)
    assert code(missing) == (401, "invalid_api_key")
    assert missing.headers["www-authenticate"] == "Bearer"
    assert missing.json()["error"]["type"] == "invalid_request_error"
    reader = keys.create("t", "query")
    refused = guarded.put("/v1/documents/note", json={"text": "x"}, headers=reader)
    assert code(refused) == (403, "insufficient_scope")
    assert "ingest" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Basic eA==", "Bearer cck_", "Bearer cck_0_0", "Bearer x y", "cck_1"],
)
def test_what_is_no_key_is_refused(guarded: httpx.Client, header: str) -> None:
    response = guarded.get("/v1/documents", headers={"authorization": header})
    assert code(response) == (401, "invalid_api_key")


def test_a_key_is_more_than_its_id(guarded: httpx.Client, keys: Keys) -> None:
    good = keys.create("t", "query")
    assert guarded.get("/v1/documents", headers=good).status_code == 200
    for bad in (good["authorization"][:-1], good["authorization"] + "x"):
        response = guarded.get("/v1/documents", headers={"authorization": bad})
        assert code(response) == (401, "invalid_api_key")
    both = [("authorization", good["authorization"])] * 2
    assert guarded.get("/v1/documents", headers=both).status_code == 401


def test_a_key_is_looked_at_before_the_request(guarded: httpx.Client) -> None:
    """Who has no key learns nothing of what is acceptable."""
    bad_id = guarded.get("/v1/documents/%ff")
    bad_body = guarded.post("/v1/query", content=b"{", headers={"content-type": "text/html"})
    bad_limit = guarded.get("/v1/documents?limit=-1")
    assert {code(r) for r in (bad_id, bad_body, bad_limit)} == {(401, "invalid_api_key")}


def test_keys_change_while_it_runs(guarded: httpx.Client, keys: Keys) -> None:
    key = keys.create("t", "query")
    assert guarded.get("/v1/documents", headers=key).status_code == 200
    keys.revoke_all()
    assert code(guarded.get("/v1/documents", headers=key)) == (401, "invalid_api_key")
    again = keys.create("t", "query")
    assert guarded.get("/v1/documents", headers=again).status_code == 200


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 2, "keys": []}', None])
def test_a_broken_file_keeps_the_keys_and_says_so(
    guarded: httpx.Client, keys: Keys, content: bytes | None
) -> None:
    key, admin = keys.create("t", "query"), keys.create("t", "admin")
    assert guarded.get("/readyz").json()["warnings"] == []
    if content is None:
        keys.path.unlink()
    else:
        keys.path.write_bytes(content)
    assert guarded.get("/v1/documents", headers=key).status_code == 200
    assert guarded.get("/readyz").json()["warnings"] == ["keys_file_unreadable"]
    assert figures(guarded, admin)["chunkcache_api_keys_stale"] == 1
    keys.path.unlink(missing_ok=True)
    other = keys.create("t", "query")
    assert guarded.get("/v1/documents", headers=other).status_code == 200
    assert guarded.get("/v1/documents", headers=key).status_code == 401
    assert guarded.get("/readyz").json()["warnings"] == []


def test_the_first_key_closes_a_running_server(
    runtime: Runtime, serve: Serve, tmp_path: Path
) -> None:
    later = Keys(tmp_path / "keys.json")
    with serve(create_app(runtime, keys=KeyRing(later.path))) as client:
        assert client.get("/v1/documents").status_code == 200
        anything = {"authorization": "Bearer none"}
        assert client.get("/v1/documents", headers=anything).status_code == 200
        key = later.create("t", "query")
        assert client.get("/v1/documents").status_code == 401
        assert client.get("/v1/documents", headers=key).status_code == 200
        later.path.unlink()
        assert client.get("/v1/documents").status_code == 401


def test_a_first_file_that_cannot_be_read_opens_nothing(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys.json")
    assert ring.is_open
    (tmp_path / "keys.json").write_text("{")
    assert not ring.is_open


def test_a_link_to_nothing_opens_nothing(tmp_path: Path) -> None:
    """From the start, and once it comes to stand in a file's place."""
    path = tmp_path / "keys.json"
    path.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(KeysFileError, match="cannot be read"):
        KeyRing(path)
    path.unlink()
    Keys(path).create("t", "query")
    ring = KeyRing(path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere.json")
    assert not ring.is_open
    assert ring.stats().num_keys == 1


def test_a_file_that_anybody_may_write_to_is_not_trusted(tmp_path: Path) -> None:
    """Not at the start, and not by a change of its mode alone; nothing is added to it."""
    keys = Keys(tmp_path / "keys.json")
    keys.create("t", "query")
    ring = KeyRing(keys.path)
    before = keys.path.read_bytes()
    keys.path.chmod(0o666)
    with pytest.raises(KeysFileError, match="chmod 600"):
        KeyRing(keys.path)
    with pytest.raises(KeysFileError, match="chmod 600"):
        keys.create("t", "admin")
    assert keys.path.read_bytes() == before
    assert ring.stats().is_stale
    keys.path.chmod(0o600)
    assert not ring.stats().is_stale


def test_changes_by_a_link_and_by_its_file_wait_for_each_other(tmp_path: Path) -> None:
    """Each finds what the other has made."""
    (tmp_path / "a").mkdir()
    there = Keys(tmp_path / "keys.json")
    there.create("t", "query")
    by_link = Keys(tmp_path / "a" / "keys.json")
    by_link.path.symlink_to(there.path)

    def during(keys: dict[str, ApiKey]) -> None:
        other.start()
        other.join(0.2)
        assert other.is_alive()
        keys.clear()

    other = threading.Thread(target=lambda: there.create("t", "query"))
    change_keys(by_link.path, during)
    other.join()
    assert by_link.path.is_symlink()
    assert len(read_keys(there.path)) == 1


@pytest.mark.parametrize("lifetime_seconds", [0.0, -1.0, math.nan, math.inf, 1e12])
def test_a_key_has_an_end_that_can_be_kept(lifetime_seconds: float) -> None:
    """What is no number reads as no end from the file."""
    with pytest.raises(InvalidValueError, match="would expire"):
        make_key("t", frozenset({"query"}), lifetime_seconds=lifetime_seconds)


def test_an_expired_key_is_refused(runtime: Runtime, serve: Serve, keys: Keys) -> None:
    now = [0.0]
    key = keys.create("t", "query", lifetime_seconds=60)
    (record,) = [k for k in json.loads(keys.path.read_bytes())["keys"] if k["expires_at"]]
    ring = KeyRing(keys.path, now=lambda: now[0])
    with serve(create_app(runtime, keys=ring)) as client:
        now[0] = record["expires_at"] - 1
        assert client.get("/v1/documents", headers=key).status_code == 200
        now[0] = record["expires_at"]
        expired = client.get("/v1/documents", headers=key)
        unknown = client.get("/v1/documents", headers={"authorization": "Bearer cck_0_0"})
        assert expired.status_code == 401
        assert expired.content == unknown.content
    assert ring.stats().refused == {"expired": 1, "unknown": 1}


def figures(client: httpx.Client, headers: dict[str, str]) -> dict[str, float]:
    response = client.get("/metrics", headers=headers)
    assert response.status_code == 200
    families = text_string_to_metric_families(response.text)
    return {s.name: s.value for f in families for s in f.samples if not s.labels}


def test_metrics_may_be_open(runtime: Runtime, serve: Serve, keys: Keys) -> None:
    app = create_app(runtime, keys=KeyRing(keys.path), metrics_are_open=True)
    with serve(app) as client:
        assert figures(client, {})["chunkcache_api_keys"] == 1
        assert client.get("/v1/documents").status_code == 401


def test_a_client_meets_its_own_errors(guarded: httpx.Client, keys: Keys) -> None:
    """OpenAI's client turns the refusals into the exceptions that its users know."""
    base_url = f"{guarded.base_url}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"
    ingest = keys.create("t", "ingest")["authorization"].removeprefix("Bearer ")
    with openai.OpenAI(base_url=base_url, api_key=ingest, max_retries=0) as client:
        assert [m.id for m in client.models.list()] == ["tiny-llama"]
        with pytest.raises(openai.PermissionDeniedError):
            client.chat.completions.create(
                model="tiny-llama", messages=[{"role": "user", "content": "Who?"}]
            )
