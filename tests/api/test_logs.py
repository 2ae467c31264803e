"""What the server logs: one line of fields each, with the request's id, and without any text."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import httpx
import pytest
from fastapi import FastAPI
from structlog.testing import capture_logs

from chunkcache.chunk_cache import ChunkCache
from chunkcache.runtime import Runtime
from chunkcache_api.app import create_app
from chunkcache_api.cli.opening import log_to_stderr
from chunkcache_retriever.retriever import Retriever
from chunkcache_retriever.testing import FixedEmbedder

Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]

SECRET = "zanzibar"


def test_no_text_of_a_request_or_document_is_logged(
    make_runtime: Callable[..., Runtime],
    serve: Serve,
    caplog: pytest.LogCaptureFixture,
    wait_until: Callable[[Callable[[], bool]], None],
) -> None:
    caplog.set_level("DEBUG")
    text = " ".join(f"The {SECRET} of door {n} is {n * 37 % 1000}." for n in range(12))
    question = {"query": f"Which {SECRET}?", "document_ids": ["handbook"], "max_tokens": 2}

    def retriever(cache: ChunkCache) -> Retriever:
        return Retriever(cache, FixedEmbedder())

    with (
        make_runtime(verify_rate=1.0) as runtime,
        serve(create_app(runtime, retriever_factory=retriever)) as client,
        capture_logs() as lines,
    ):
        client.put("/v1/documents/handbook", json={"text": text, "metadata": {"a": SECRET}})
        client.put("/v1/documents/handbook", json={"text": text, "digest": "0" * 64})
        client.put("/v1/documents/handbook", json={"text": text, SECRET: SECRET})
        client.post("/v1/search", json={"query": SECRET})
        client.post("/v1/query", json={"query": SECRET, "top_k": 2, "max_tokens": 2})
        for reuse in ({}, {"verify": True}, {"policy": "full"}, {"show_prompt": True}):
            client.post("/v1/query", json=question | {"chunkcache": reuse})
            client.post("/v1/query", json=question | {"chunkcache": reuse, "stream": True})
        client.post("/v1/query", json=question | {"temperature": SECRET})
        client.post("/v1/query", content=f"{{{SECRET}", headers={"content-type": "text/plain"})
        chat = {"model": "tiny-llama", "messages": [{"role": "user", "content": SECRET}]}
        client.post("/v1/chat/completions", json=chat | {"max_tokens": 2})
        client.post("/v1/chat/completions", json=chat | {"tools": [SECRET]})
        # Verifications run behind the answers, and hold pages until they end.
        pool = runtime.pool
        wait_until(lambda: pool.num_free_pages == pool.num_pages)
        pool.check_integrity()
        _break(runtime)
        failed = client.post("/v1/query", json=question)
        assert failed.status_code == 500
    assert any(line["event"] == "request_failed" for line in lines)
    assert SECRET not in repr(lines)
    assert SECRET not in caplog.text


def _break(runtime: Runtime) -> None:
    """Whatever the engine runs from now on fails inside the model."""
    runner = runtime.model.runner

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a shape that does not fit")

    runtime.engine.call(lambda: setattr(runner, "logits", fail)).result()


def test_a_line_has_a_time_a_level_and_the_requests_id(
    runtime: Runtime, serve: Serve, capfd: pytest.CaptureFixture[str]
) -> None:
    import structlog

    before = structlog.get_config()
    log_to_stderr()
    try:
        with structlog.contextvars.bound_contextvars(request_id="req_1"):
            structlog.get_logger("chunkcache.api").warning("request_refused", code="store_full")
    finally:
        structlog.configure(**before)
    (line,) = [x for x in capfd.readouterr().err.splitlines() if "request_refused" in x]
    assert line.startswith("timestamp=")
    assert "level=warning" in line
    assert "request_id=req_1" in line
    assert "code=store_full" in line
    assert threading.current_thread() is threading.main_thread()
