"""Limits of questions: per key and tenant, by tokens that wait, and of readers that do not read."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Message

from chunkcache.errors import QueueFullError
from chunkcache.runtime import Runtime
from chunkcache_api.app import create_app
from chunkcache_api.auth.api_key import make_key
from chunkcache_api.auth.key_ring import KeyRing
from chunkcache_api.auth.keys_file import change_keys
from chunkcache_api.workers import Claim, WorkerPool, WorkerScope

MakeRuntime = Callable[..., Runtime]
Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]
WaitUntil = Callable[[Callable[[], bool]], None]
BusyEngine = Callable[[Runtime], AbstractContextManager[None]]
BODY = {"query": "Who?", "document_ids": [], "max_tokens": 1}


def key_headers(path: Path, tenant: str) -> dict[str, str]:
    text, key = make_key(tenant, frozenset({"query", "ingest"}))
    change_keys(path, lambda keys: keys.update({key.key_id: key}))
    return {"authorization": f"Bearer {text}"}


def test_one_key_has_so_many_questions_in_flight(
    make_runtime: MakeRuntime,
    serve: Serve,
    tmp_path: Path,
    wait_until: WaitUntil,
    busy_engine: BusyEngine,
) -> None:
    path = tmp_path / "keys.json"
    red, other_red, blue = (key_headers(path, t) for t in ("red", "red", "blue"))
    settings = {"max_requests_per_key": 2, "max_queued_requests": 3, "decode_tile_rows": 1}
    with (
        make_runtime(**settings) as runtime,
        ThreadPoolExecutor(4) as threads,
        serve(create_app(runtime, keys=KeyRing(path))) as client,
    ):

        def post(headers: dict[str, str]) -> httpx.Response:
            return client.post("/v1/query", json=BODY, headers=headers)

        with busy_engine(runtime):
            accepted = [threads.submit(post, red) for _ in range(2)]
            wait_until(lambda: runtime.engine.num_open_requests == 2)
            by_key = post(red)
            accepted.append(threads.submit(post, other_red))
            wait_until(lambda: runtime.engine.num_open_requests == 3)
            by_tenant = post(other_red)
            accepted.append(threads.submit(post, blue))
            wait_until(lambda: runtime.engine.num_open_requests == 4)
        assert [a.result().status_code for a in accepted] == [200] * 4
        for refused, what in ((by_key, "this key"), (by_tenant, "this tenant")):
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "queue_full"
            assert what in refused.json()["error"]["message"]
        assert post(red).status_code == 200


def test_tokens_that_wait_are_bounded(
    make_runtime: MakeRuntime, serve: Serve, wait_until: WaitUntil, busy_engine: BusyEngine
) -> None:
    with (
        make_runtime(max_queued_tokens=1) as runtime,
        ThreadPoolExecutor(1) as threads,
        serve(create_app(runtime)) as client,
    ):
        with busy_engine(runtime):
            accepted = threads.submit(client.post, "/v1/query", json=BODY)
            wait_until(lambda: runtime.engine.num_open_requests == 1)
            refused = client.post("/v1/query", json=BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "tokens wait" in refused.json()["error"]["message"]
        assert accepted.result().status_code == 200
        assert client.post("/v1/query", json=BODY).status_code == 200


def test_claims_are_given_back() -> None:
    """However a producer ends."""

    async def run() -> None:
        pool = WorkerPool(4)
        may_end = threading.Event()

        def wait(scope: WorkerScope) -> None:
            may_end.wait()
            raise ValueError("a failure")

        with pool.start(wait, [Claim("key:a", 1)]) as worker:
            with pytest.raises(QueueFullError):
                pool.start(wait, [Claim("tenant:t", 5), Claim("key:a", 1)])
            assert pool.num_alive == 1
            may_end.set()
            with pytest.raises(ValueError, match="a failure"):
                await anext(worker)
            worker.join()
        with (
            pool.start(wait, [Claim("key:a", 1)]) as worker,
            pytest.raises(ValueError, match="a failure"),
        ):
            await anext(worker)

    asyncio.run(run())


def test_a_reader_that_does_not_read_is_given_up(
    make_runtime: MakeRuntime, wait_until: WaitUntil
) -> None:
    """The stream ends without its end, and nothing is held for it any more."""
    with make_runtime(stalled_stream_seconds=0.05) as runtime:
        sent = asyncio.run(_stream_to_one_who_does_not_read(create_app(runtime)))
        assert [m["type"] for m in sent] == ["http.response.start", "http.response.body"]
        assert sent[-1]["more_body"] is True
        wait_until(lambda: runtime.engine.num_open_requests == 0)
        assert runtime.pool.num_free_pages == runtime.pool.num_pages


async def _stream_to_one_who_does_not_read(app: FastAPI) -> list[Message]:
    body = b'{"query": "Who?", "document_ids": [], "stream": true, "max_tokens": 1000}'
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "method": "POST",
        "path": "/v1/query",
        "raw_path": b"/v1/query",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "app": app,
    }
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if messages:
            return messages.pop()
        return await asyncio.Future()

    async def send(message: Message) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            await asyncio.Future()

    async with app.router.lifespan_context(app):
        await app(scope, receive, send)
    return sent
