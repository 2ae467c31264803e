"""``/metrics``: what Prometheus' own parser reads, against what the responses said."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from chunkcache.runtime import Runtime
from chunkcache_api.app import create_app

Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

QUESTION = {"query": "What is the code of door 3?", "document_ids": ["handbook"], "max_tokens": 6}
MODEL = {"model": "tiny-llama"}
ALLOWED_LABELS = {"model", "tier", "reason", "outcome", "source", "le", "version"}


def scrape(client: httpx.Client) -> Samples:
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in text_string_to_metric_families(response.text)
        for s in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


@pytest.fixture
def serve_handbook(
    make_runtime: Callable[..., Runtime], serve: Serve
) -> Callable[..., AbstractContextManager[httpx.Client]]:
    """Servers whose counts begin at 0, with a document of several chunks."""

    @contextmanager
    def run(**settings: object) -> Iterator[httpx.Client]:
        with make_runtime(**settings) as runtime, serve(create_app(runtime)) as client:
            text = " ".join(f"The code of door {n} is {n * 37 % 1000}." for n in range(12))
            assert client.put("/v1/documents/handbook", json={"text": text}).status_code == 201
            yield client

    return run


@pytest.fixture
def fresh(
    serve_handbook: Callable[..., AbstractContextManager[httpx.Client]],
) -> Iterator[httpx.Client]:
    with serve_handbook() as client:
        yield client


def test_what_was_answered_is_what_is_counted(fresh: httpx.Client) -> None:
    before = scrape(fresh)
    assert value(before, "chunkcache_ready") == 1
    assert value(before, "chunkcache_time_to_first_token_seconds_count", **MODEL) == 0
    bodies = [fresh.post("/v1/query", json=QUESTION).json() for _ in range(2)]
    exact = fresh.post("/v1/query", json=QUESTION | {"chunkcache": {"policy": "full"}}).json()
    missed = QUESTION | {"chunkcache": {"on_miss": "error"}, "document_ids": ["nowhere"]}
    assert fresh.post("/v1/query", json=missed).status_code == 404
    after = scrape(fresh)

    usages = [b["usage"] for b in (*bodies, exact)]
    details = [u["prompt_tokens_details"] for u in usages]
    prompt = {
        source: value(after, "chunkcache_prompt_tokens_total", source=source, **MODEL)
        for source in ("device", "host", "disk", "remote", "recomputed", "computed")
    }
    assert sum(prompt.values()) == sum(u["prompt_tokens"] for u in usages)
    assert prompt["host"] == sum(d["cached_tokens_by_source"]["host"] for d in details) > 0
    assert prompt["recomputed"] == sum(d["recomputed_tokens"] for d in details)
    fused = value(after, "chunkcache_fused_tokens_total", **MODEL)
    assert fused == sum(d["fused_tokens"] for d in details)
    prefix = value(after, "chunkcache_exact_prefix_tokens_total", **MODEL)
    assert prefix == sum(d["exact_prefix_tokens"] for d in details)
    assert value(after, "chunkcache_answer_tokens_total", **MODEL) == 18
    assert value(after, "chunkcache_requests_total", outcome="length", **MODEL) == 3
    stages = ("queue", "load", "fuse", "decode", "time_to_first_token")
    for stage in stages:
        assert value(after, f"chunkcache_{stage}_seconds_count", **MODEL) == 3
    assert value(after, "chunkcache_inter_token_latency_seconds_count", **MODEL) == 15
    spent = sum(b["chunkcache"]["timings"]["ttft_ms"] for b in (*bodies, exact)) / 1e3
    found = value(after, "chunkcache_time_to_first_token_seconds_sum", **MODEL)
    assert found == pytest.approx(spent, rel=1e-3)
    assert value(after, "chunkcache_open_requests", **MODEL) == 0
    assert value(after, "chunkcache_queue_depth", **MODEL) == 0
    pages = value(after, "chunkcache_pages", **MODEL)
    assert 0 < value(after, "chunkcache_free_pages", **MODEL) <= pages


def test_the_store_s_books_are_shown(fresh: httpx.Client) -> None:
    chunks = len(fresh.get("/v1/documents/handbook").json()["chunks"])
    fresh.post("/v1/query", json=QUESTION)
    samples = scrape(fresh)
    assert value(samples, "chunkcache_tier_entries", tier="disk") == chunks > 1
    assert value(samples, "chunkcache_tier_bytes", tier="disk") > 0
    assert value(samples, "chunkcache_stored_entries_total") == chunks
    assert value(samples, "chunkcache_prefills_total") == chunks
    assert value(samples, "chunkcache_misses_total", reason="absent") == chunks
    assert value(samples, "chunkcache_hits_total", tier="host") >= chunks
    hits = sum(v for (name, _), v in samples.items() if name == "chunkcache_hits_total")
    misses = sum(v for (name, _), v in samples.items() if name == "chunkcache_misses_total")
    assert value(samples, "chunkcache_lookups_total") == hits + misses
    assert value(samples, "chunkcache_evictions_total", tier="host") == 0
    assert value(samples, "chunkcache_admission_refusals_total", tier="host") == 0
    assert value(samples, "chunkcache_pinned_bytes") == 0
    assert value(samples, "chunkcache_quarantined_entries") == 0
    assert value(samples, "chunkcache_open_leases") == 0


def test_verifications_are_shown(
    serve_handbook: Callable[..., AbstractContextManager[httpx.Client]],
) -> None:
    with serve_handbook(verify_rate=1.0) as client:
        for n in range(3):
            client.post("/v1/query", json=QUESTION | {"query": f"Door {n}?"})
        samples = scrape(client)
        while value(samples, "chunkcache_verify_verified_total", **MODEL) < 3:
            samples = scrape(client)
    assert value(samples, "chunkcache_verify_sampled_total", **MODEL) == 3
    assert value(samples, "chunkcache_verify_dropped_total", **MODEL) == 0
    assert value(samples, "chunkcache_verify_failed_total", **MODEL) == 0
    for name in ("chunkcache_verify_kl", "chunkcache_verify_agreement"):
        assert value(samples, f"{name}_count", **MODEL) == 3
        assert value(samples, f"{name}_bucket", le="+Inf", **MODEL) == 3
    assert value(samples, "chunkcache_verify_agreement_bucket", le="1.0", **MODEL) == 3
    assert value(samples, "chunkcache_verify_kl_sum", **MODEL) > 0


def test_fallbacks_and_cancellations_have_a_reason(
    make_runtime: Callable[..., Runtime], serve: Serve
) -> None:
    with (
        make_runtime(min_fused_context_tokens=4_000) as runtime,
        serve(create_app(runtime)) as client,
    ):
        client.put("/v1/documents/handbook", json={"text": "Door 3 has the code 4017."})
        client.post("/v1/query", json=QUESTION)
        body = QUESTION | {"stream": True, "max_tokens": 1_000}
        with client.stream("POST", "/v1/query", json=body) as response:
            assert next(response.iter_raw())
        samples = scrape(client)
        while value(samples, "chunkcache_open_requests", **MODEL):
            samples = scrape(client)
        assert (
            value(samples, "chunkcache_requests_total", outcome="request_cancelled", **MODEL) == 1
        )
        reason = "context_too_short"
        assert value(samples, "chunkcache_fallbacks_total", reason=reason, **MODEL) == 1


def test_names_and_labels_are_prometheus_own(fresh: httpx.Client) -> None:
    fresh.post("/v1/query", json=QUESTION)
    response = fresh.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    families = list(openmetrics_families(response.text))
    assert len({f.name for f in families}) == len(families) > 30
    for family in families:
        assert family.documentation
        assert family.name.startswith(("chunkcache_", "process_"))
        for sample in family.samples:
            assert set(sample.labels) <= ALLOWED_LABELS, sample


def test_two_applications_do_not_share_figures(
    make_runtime: Callable[..., Runtime], serve: Serve
) -> None:
    with (
        make_runtime() as one,
        make_runtime() as other,
        serve(create_app(one)) as asked,
        serve(create_app(other)) as idle,
    ):
        asked.post("/v1/query", json=QUESTION | {"document_ids": []})
        assert value(scrape(asked), "chunkcache_answer_tokens_total", **MODEL) == 6
        assert value(scrape(idle), "chunkcache_answer_tokens_total", **MODEL) == 0


def test_a_server_that_is_still_loading_says_so(serve: Serve) -> None:
    is_wanted = threading.Event()

    def load() -> Runtime:
        is_wanted.wait(60)
        raise RuntimeError("the test is over")

    app = create_app(load)
    with serve(app) as client:
        samples = scrape(client)
        is_wanted.set()
    assert value(samples, "chunkcache_ready") == 0
    assert not any(name.startswith("chunkcache_tier") for name, _ in samples)
