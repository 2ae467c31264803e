"""The API against its own description, by generated requests of two tenants.

Whatever comes, no error of the server's but the declared ones, every error in one form, and
nothing of one tenant seen by another. ``make fuzz`` runs more of it.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from chunkcache.runtime import Runtime
from chunkcache_api.app import ERRORS, create_app
from chunkcache_api.auth.access import ROUTE_SCOPES
from chunkcache_api.auth.api_key import SCOPES, make_key
from chunkcache_api.auth.key_ring import KeyRing
from chunkcache_api.auth.keys_file import change_keys

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

schemathesis.serializer("application/x-ndjson")(lambda _, value: str(value).encode())

Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]

NUM_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "4"))
"""Requests per operation and kind; chains of requests likewise."""
QUICK = settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    derandomize=NUM_EXAMPLES < 100,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
TENANTS = ("acme", "umbrella")
OPERATIONS = sorted(
    (method, path.replace(":opaque", ""))
    for method, path in ROUTE_SCOPES
    if path not in ("/", "/web/{name}", "/openapi.json")
)
DECLARED = {status for status in ERRORS if isinstance(status, int)}


class Server:
    """A server with two tenants' keys, and its description."""

    def __init__(self, client: httpx.Client, keys: dict[str, str]) -> None:
        self.client = client
        self.keys = keys
        self.schema = schemathesis.openapi.from_url(f"{client.base_url}/openapi.json")

    def call(self, case: Any, tenant: str) -> Any:
        return case.call(headers={"authorization": f"Bearer {self.keys[tenant]}"}, timeout=60)

    def stored(self, tenant: str) -> set[str]:
        """The ids of a tenant's documents."""
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        page = self.client.get("/v1/documents", params={"limit": 1000}, headers=headers).json()
        assert not page["has_more"]
        return {document["id"] for document in page["data"]}


@pytest.fixture(scope="module")
def runtime(make_runtime: Callable[..., Runtime]) -> Iterator[Runtime]:
    """Small enough that whatever is asked for ends soon."""
    with make_runtime(max_answer_tokens=4, pool_tokens=2048) as runtime:
        yield runtime
        assert runtime.engine.num_open_requests == 0
        assert runtime.stack.stats().leases_open == 0
        runtime.stack.check_integrity()


@pytest.fixture(scope="module")
def server(
    runtime: Runtime, serve: Serve, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.json"
    texts: dict[str, str] = {}
    for tenant in TENANTS:
        texts[tenant], key = make_key(tenant, frozenset(SCOPES))
        change_keys(path, lambda keys, key=key: keys.update({key.key_id: key}))
    with serve(create_app(runtime, keys=KeyRing(path), max_body_bytes=1 << 20)) as client:
        yield Server(client, texts)


def check(response: Any) -> None:
    """What holds of every response."""
    status, told = response.status_code, response.content
    assert status < 500 or status in DECLARED, (status, told)
    assert "x-request-id" in {name.lower() for name in response.headers}
    if status >= 400 and response.request.method != "HEAD":
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["code"], str)
        assert "Traceback" not in error["message"]


def test_every_route_is_described_with_its_errors(server: Server) -> None:
    paths = server.schema.raw_schema["paths"]
    described = {(method.upper(), path) for path, item in paths.items() for method in item}
    assert described == set(OPERATIONS)
    for item in paths.values():
        for operation in item.values():
            assert set(operation["responses"]) >= {"4XX", "503", "507"}
            assert "422" not in operation["responses"], "not our form of errors"


@pytest.mark.parametrize("kind", ["positive", "negative"])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_request_brings_an_undeclared_failure(
    server: Server, method: str, path: str, kind: str
) -> None:
    mode = schemathesis.GenerationMode(kind)
    operation = server.schema[path][method]
    tenants = cycle(TENANTS)

    @QUICK
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        check(server.call(case, next(tenants)))

    try:
        ask()
    except Unsatisfiable:
        pytest.skip("nothing can be wrong about it")


def test_chains_of_requests_keep_tenants_apart(server: Server) -> None:
    """What one has stored and the other has not is there for the one alone."""
    owned: dict[str, set[str]] = {tenant: server.stored(tenant) for tenant in TENANTS}
    turns = cycle(TENANTS)
    num_seen = {"stored": 0, "found": 0}

    # One kind of chain: what is stored under an id of the client's, asked about, and deleted.
    told = server.schema.include(
        path_regex=r"^/v1/(documents$|documents/\{id\}|query|search|requests)"
    )

    class Chains(told.as_state_machine()):  # pyright: ignore
        def setup(self) -> None:
            self.tenant = next(turns)

        def before_call(self, case: Any) -> None:
            self.tenant = next(turns)
            case.headers = {"authorization": f"Bearer {server.keys[self.tenant]}"}

        def validate_response(self, response: Any, case: Any, **_: Any) -> None:
            check(response)

        def after_call(self, response: Any, case: Any) -> None:
            path, mine = urlsplit(response.request.url).path, owned[self.tenant]
            name = unquote(path.removeprefix("/v1/documents/"))
            if path.startswith("/v1/documents/"):
                if case.method == "PUT" and response.status_code in (200, 201):
                    mine.add(name)
                    num_seen["stored"] += 1
                elif response.status_code == 200:
                    assert name in mine, (self.tenant, name)
                    num_seen["found"] += 1
                    if case.method == "DELETE":
                        mine.discard(name)
            elif path == "/v1/documents" and case.method == "GET" and response.status_code == 200:
                assert {d["id"] for d in response.json()["data"]} <= mine
            elif path == "/v1/documents" and response.status_code == 200:
                lines = [json.loads(line) for line in response.content.splitlines()]
                mine.update(x["id"] for x in lines if x.get("status") in ("created", "updated"))

    Chains.run(settings=settings(QUICK, max_examples=NUM_EXAMPLES * 3, stateful_step_count=8))
    assert num_seen["stored"] > 0
    assert all(server.stored(tenant) <= owned[tenant] for tenant in TENANTS)
