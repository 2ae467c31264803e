"""Spans of requests and their stages: in the client's trace, with counts and never with text."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from chunkcache.runtime import Runtime
from chunkcache_api.app import create_app

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]

SECRET = "zanzibar"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
STAGES = ["lookup", "queue", "load", "prefill", "fuse", "decode"]
QUESTION = {"query": f"Which {SECRET}?", "document_ids": ["handbook"], "max_tokens": 4}


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(
    make_runtime: Callable[..., Runtime],
    serve: Serve,
    spans: InMemorySpanExporter,
    wait_until: Callable[[Callable[[], bool]], None],
) -> Iterator[httpx.Client]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    with (
        make_runtime() as runtime,
        serve(create_app(runtime, tracer_provider=provider)) as client,
    ):
        text = " ".join(f"The {SECRET} of door {n} is {n * 37 % 1000}." for n in range(12))
        assert client.put("/v1/documents/handbook", json={"text": text}).status_code == 201
        wait_until(lambda: len(spans.get_finished_spans()) == 1)
        spans.clear()
        yield client


def finished(
    spans: InMemorySpanExporter, wait_until: Callable[[Callable[[], bool]], None]
) -> dict[str, ReadableSpan]:
    """By name, once the request's own span has ended, which it does behind the response."""
    wait_until(lambda: any(s.name.startswith("POST") for s in spans.get_finished_spans()))
    return {span.name: span for span in spans.get_finished_spans()}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_question_is_told_stage_by_stage_in_its_callers_trace(
    traced: httpx.Client,
    spans: InMemorySpanExporter,
    wait_until: Callable[[Callable[[], bool]], None],
    is_streamed: bool,
) -> None:
    response = traced.post("/v1/query", json=QUESTION | {"stream": is_streamed}, headers=PARENT)
    assert response.status_code == 200
    found = finished(spans, wait_until)
    root = found.pop("POST /v1/query")
    assert sorted(found) == sorted(STAGES)
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == CALLER
    for span in found.values():
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == TRACE
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
        assert span.start_time is not None
        assert span.end_time is not None
        assert root.start_time <= span.start_time <= span.end_time
    starts = [found[name].start_time for name in STAGES]
    assert starts == sorted(starts)
    if not is_streamed:
        details = response.json()["usage"]["prompt_tokens_details"]
        fuse = found["fuse"].attributes
        assert fuse is not None
        assert fuse["chunkcache.fused_tokens"] == details["fused_tokens"]
        assert fuse["chunkcache.recomputed_tokens"] == details["recomputed_tokens"]
        load = found["load"].attributes
        assert load is not None
        by_source = details["cached_tokens_by_source"]
        assert load["chunkcache.tokens_host"] == by_source["host"]


def test_a_conversation_is_told_likewise(
    traced: httpx.Client,
    spans: InMemorySpanExporter,
    wait_until: Callable[[Callable[[], bool]], None],
) -> None:
    body = {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": f"Which {SECRET}?"}],
        "documents": [{"id": "handbook"}, {"id": "note", "text": f"The {SECRET} is blue."}],
        "max_tokens": 2,
        "n": 2,
    }
    assert traced.post("/v1/chat/completions", json=body).status_code == 200
    found = finished(spans, wait_until)
    decode = found["decode"].attributes
    assert decode is not None
    assert decode["chunkcache.answers"] == 2
    assert_no_text(spans)


def test_a_refusal_is_told_by_its_code(
    traced: httpx.Client,
    spans: InMemorySpanExporter,
    wait_until: Callable[[Callable[[], bool]], None],
) -> None:
    missing = QUESTION | {"document_ids": [f"{SECRET}-paper"]}
    assert traced.post("/v1/query", json=missing).status_code == 404
    found = finished(spans, wait_until)
    assert set(found) == {"lookup", "POST /v1/query"}
    lookup = found["lookup"]
    assert lookup.status.status_code == StatusCode.ERROR
    assert lookup.attributes is not None
    assert lookup.attributes["error.type"] == "document_not_found"
    assert_no_text(spans)


def test_no_text_is_in_any_span(
    traced: httpx.Client,
    spans: InMemorySpanExporter,
    wait_until: Callable[[Callable[[], bool]], None],
) -> None:
    traced.put("/v1/documents/more", json={"text": f"More {SECRET}.", "metadata": {"a": SECRET}})
    for reuse in ({"verify": True}, {"policy": "full"}, {"dry_run": True}, {"show_prompt": True}):
        response = traced.post("/v1/query", json=QUESTION | {"chunkcache": reuse})
        assert response.status_code == 200
    traced.post("/v1/query", json={"query": SECRET, "nonsense": SECRET})
    traced.post("/v1/query", content=f"{{{SECRET}")
    finished(spans, wait_until)
    assert_no_text(spans)


def assert_no_text(spans: InMemorySpanExporter) -> None:
    told = "".join(span.to_json() for span in spans.get_finished_spans())
    assert told
    assert SECRET not in told


def test_without_a_provider_nothing_is_traced_whatever_the_process_has(
    runtime: Runtime, serve: Serve, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", provider)
    with serve(create_app(runtime)) as client:
        assert client.get("/v1/models", headers=PARENT).status_code == 200
    assert spans.get_finished_spans() == ()


class _Collector(BaseHTTPRequestHandler):
    """Takes what an exporter sends."""

    taken: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.taken.append((self.path, body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def test_spans_are_sent_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="no OTLP exporter")
    from chunkcache_api.span_export import exported_spans

    _Collector.taken = []
    with HTTPServer(("127.0.0.1", 0), _Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
        with exported_spans() as provider:
            provider.get_tracer("test").start_span("lookup").end()
        server.shutdown()
        thread.join()
    ((path, body),) = _Collector.taken
    assert path == "/v1/traces"
    assert b"lookup" in body
    assert b"chunkcache" in body
    assert b"deployment.environment" in body
