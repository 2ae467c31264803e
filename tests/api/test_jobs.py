"""Pre-caching jobs: they outlive connections, leave room for questions, and end when told to."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from chunkcache.chunk_cache import ChunkCache
from chunkcache.identity import TokenizerDigest
from chunkcache.ingest import DocumentIngest
from chunkcache.lookup import look_up_documents
from chunkcache.precache import StoredDocument
from chunkcache.runtime import Runtime
from chunkcache_api import jobs as jobs_module
from chunkcache_api.app import create_app
from chunkcache_retriever.neighbours import OverlapNeighbours

WaitUntil = Callable[[Callable[[], bool]], None]
BusyEngine = Callable[[Runtime], AbstractContextManager[None]]


def refusal(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def new(name: str, num_sentences: int = 2) -> dict[str, Any]:
    text = " ".join(f"Shelf {n} of {name} holds box {n * 13 % 97}." for n in range(num_sentences))
    return {"id": name, "text": text}


def submit(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/precache", json=body)
    assert response.status_code == 202, response.text
    job = response.json()
    assert response.headers["location"] == f"/v1/jobs/{job['id']}"
    assert job["status"] in ("queued", "running", "completed")
    return job


@pytest.fixture
def ended(client: httpx.Client, wait_until: WaitUntil) -> Callable[[dict[str, Any]], Any]:
    """Waits for a job's end; gives what is told of it then."""

    def wait(job: dict[str, Any]) -> dict[str, Any]:
        def now() -> dict[str, Any]:
            return client.get(f"/v1/jobs/{job['id']}").json()

        wait_until(lambda: now()["status"] not in ("queued", "running"))
        return now()

    return wait


def test_a_job_stores_and_caches_new_documents(client: httpx.Client, ended) -> None:
    job = ended(submit(client, documents=[new("j1"), new("j2", 12)]))
    assert (job["status"], job["error"], job["failures"]) == ("completed", None, [])
    assert job["summary"]["created"] == 2
    assert job["progress"]["done"] == job["progress"]["documents"] == 2
    assert job["summary"]["prefilled_tokens"] == job["progress"]["prefilled_tokens"] > 0
    assert job["created_at"] <= job["started_at"] <= job["ended_at"]
    body = {"document_ids": ["j1", "j2"]}
    found = client.post("/v1/documents/lookup", json=body).json()["data"]
    assert all(d["cached"] for d in found)


def test_a_job_caches_what_is_stored(client: httpx.Client, ended) -> None:
    client.put("/v1/documents/s1", json={"text": new("s1", 6)["text"], "ttl_seconds": 3600})
    client.post("/v1/cache/clear", json={"tiers": ["disk"]}).raise_for_status()
    body = {"document_ids": ["s1"]}
    assert not client.post("/v1/documents/lookup", json=body).json()["data"][0]["cached"]
    job = ended(submit(client, document_ids=["s1", "none"]))
    assert job["status"] == "completed"
    assert [f["code"] for f in job["failures"]] == ["document_not_found"]
    assert client.post("/v1/documents/lookup", json=body).json()["data"][0]["cached"]
    kept = client.get("/v1/documents/s1").json()
    assert kept["expires_at"] is not None, "a document's expiry is none of the job's business"
    assert kept["version"] == 1


def test_without_documents_a_job_is_about_all_of_them(client: httpx.Client, ended) -> None:
    client.put("/v1/documents/all1", json={"text": new("all1")["text"]}).raise_for_status()
    client.post("/v1/cache/clear", json={"tiers": ["disk"]}).raise_for_status()
    job = ended(submit(client))
    num_documents = len(client.get("/v1/documents", params={"limit": 1000}).json()["data"])
    assert job["summary"]["documents"] == job["progress"]["documents"] == num_documents
    assert job["summary"]["prefilled_chunks"] > 0


def test_items_that_fail_are_told(client: httpx.Client, ended) -> None:
    job = ended(submit(client, documents=[{"id": "", "text": "x"}, {"id": "e", "text": " "}]))
    assert job["status"] == "completed"
    assert sorted(f["code"] for f in job["failures"]) == ["empty_document", "invalid_value"]
    assert job["summary"]["failures"] == 2


def test_jobs_run_one_at_a_time_are_bounded_and_can_be_cancelled(
    client: httpx.Client, runtime: Runtime, busy_engine: BusyEngine, ended
) -> None:
    with busy_engine(runtime):
        made = [
            submit(client, documents=[new(f"q{n}", 12)])
            for n in range(jobs_module.MAX_UNFINISHED_JOBS)
        ]
        refused = client.post("/v1/precache", json={"documents": [new("more")]})
        assert refusal(refused)[:2] == (429, "queue_full")
        assert refused.headers["retry-after"]
        for job in made[1:]:
            cancelled = client.post(f"/v1/jobs/{job['id']}/cancel").json()
            assert cancelled["status"] == "cancelled"
        client.post(f"/v1/jobs/{made[0]['id']}/cancel", json={}).raise_for_status()
    first = ended(made[0])
    assert first["status"] == "cancelled"
    assert client.get("/v1/documents/q1").status_code == 404, "a cancelled job did something"
    again = client.post(f"/v1/jobs/{made[0]['id']}/cancel").json()
    assert again["status"] == "cancelled"
    assert ended(submit(client, documents=[new("q0", 12)]))["status"] == "completed"


def test_a_cancelled_job_ends_behind_the_chunk_it_is_at(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, ended
) -> None:
    note = jobs_module.PrecacheJobs._note

    def cancelling(self: Any, job: Any, progress: Any, pace: Any) -> None:
        if progress.prefilled_chunks == 2:
            job.is_cancelled.set()
        note(self, job, progress, pace)

    monkeypatch.setattr(jobs_module.PrecacheJobs, "_note", cancelling)
    job = ended(submit(client, documents=[new("long", 60)]))
    assert job["status"] == "cancelled"
    assert job["progress"]["prefilled_chunks"] == 2
    body = {"document_ids": ["long"]}
    found = client.post("/v1/documents/lookup", json=body).json()["data"][0]
    assert 2 <= found["cached_chunks"] < found["chunks"], "what was finished is kept"


def test_a_job_goes_on_when_its_client_has_left(client: httpx.Client, ended, runtime) -> None:
    with httpx.Client(base_url=client.base_url, trust_env=False) as other:
        job = submit(other, documents=[new("left", 20)])
    assert ended(job)["status"] == "completed"


def test_a_job_pauses_while_questions_are_open(
    client: httpx.Client, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a chunk it waits until none is open, or for a multiple of the chunk's own time."""
    open_requests = [1, 1, 1, 0]
    waits: list[float] = []

    class Engine:
        @property
        def num_open_requests(self) -> int:
            return open_requests.pop(0) if open_requests else 0

    class Cancelled(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return False

    class Cache:
        runtime = type("R", (), {"engine": Engine()})()

    class Job:
        is_cancelled = Cancelled()

    class Progress:
        prefilled_chunks = 1

    monkeypatch.setattr(jobs_module, "MAX_QUERY_SHARE", 1e9)
    pace = jobs_module._Pace(Cache(), Job())  # type: ignore[arg-type]
    pace.wait(Progress())  # type: ignore[arg-type]
    assert len(waits) == 3
    pace.wait(Progress())  # type: ignore[arg-type]
    assert len(waits) == 3, "the same chunk again"


def test_lists_of_jobs(client: httpx.Client, ended) -> None:
    for n in range(3):
        ended(submit(client, documents=[new(f"l{n}")]))
    jobs = client.get("/v1/jobs", params={"limit": 2}).json()
    assert (jobs["object"], len(jobs["data"]), jobs["has_more"]) == ("list", 2, True)
    rest = client.get("/v1/jobs", params={"after": jobs["last_id"], "limit": 1}).json()["data"]
    ids = [j["id"] for j in (*jobs["data"], *rest)]
    assert len(set(ids)) == 3
    times = [j["created_at"] for j in (*jobs["data"], *rest)]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("method", "url", "body", "status", "code"),
    [
        ("GET", "/v1/jobs/job_no", None, 404, "job_not_found"),
        ("POST", "/v1/jobs/job_no/cancel", None, 404, "job_not_found"),
        ("POST", "/v1/jobs/job_no/cancel", {"x": 1}, 400, "unsupported_parameter"),
        ("GET", "/v1/jobs?limit=0", None, 400, "invalid_value"),
        ("GET", "/v1/jobs?after=no", None, 400, "invalid_value"),
        ("POST", "/v1/precache", {"documents": [{"id": "x"}]}, 400, "invalid_value"),
        ("POST", "/v1/precache", {"document_ids": "x"}, 400, "invalid_value"),
        ("POST", "/v1/precache", {"paths": ["/etc"]}, 400, "unsupported_parameter"),
    ],
)
def test_what_is_refused(
    client: httpx.Client, method: str, url: str, body: Any, status: int, code: str
) -> None:
    assert refusal(client.request(method, url, json=body))[:2] == (status, code)


def test_a_failure_is_the_jobs_own(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, ended
) -> None:
    def failing(self: DocumentIngest, *args: Any) -> Any:
        raise RuntimeError("secret /srv/path")

    monkeypatch.setattr(DocumentIngest, "store", failing)
    with capture_logs():
        job = ended(submit(client, documents=[new("f")]))
    assert job["status"] == "failed"
    assert job["error"]["code"] == "internal_error"
    assert "secret" not in str(job)
    monkeypatch.undo()
    assert ended(submit(client, documents=[new("f")]))["status"] == "completed"


@pytest.fixture
def with_neighbours(make_runtime) -> Iterator[Runtime]:
    with make_runtime(preparation="neighbours(1)") as runtime:
        yield runtime


def test_neighbours_are_found_by_a_job(
    with_neighbours: Runtime, serve, wait_until: WaitUntil
) -> None:
    def run(app: Any) -> dict[str, Any]:
        with serve(app) as client:
            job = submit(client, documents=[new("n1"), new("n2")])
            url = f"/v1/jobs/{job['id']}"
            wait_until(lambda: client.get(url).json()["status"] not in ("queued", "running"))
            return client.get(url).json()

    failed = run(create_app(with_neighbours))
    assert (failed["status"], failed["error"]["param"]) == ("failed", "neighbours")
    done = run(
        create_app(
            with_neighbours, neighbours_factory=lambda cache: OverlapNeighbours(cache.catalog)
        )
    )
    assert (done["status"], done["summary"]["without_neighbours"]) == ("completed", 0)


def test_a_server_that_stops_ends_its_jobs(make_runtime, serve, busy_engine: BusyEngine) -> None:
    with make_runtime() as runtime, serve(create_app(runtime)) as client:
        job = submit(client, documents=[new(f"stop{n}", 60) for n in range(20)])
        assert job["status"] in ("queued", "running")
    assert not any(t.name == "chunkcache-jobs" for t in threading.enumerate())


def test_documents_of_another_tokenizer_are_cut_again(runtime: Runtime) -> None:
    cache = ChunkCache(runtime)
    cache.put("old", new("old", 8)["text"], {"k": 1}, ttl_seconds=3600)
    other = replace(cache.get("old"), tokenizer=TokenizerDigest(b"o" * 32))
    cache.catalog.put(other, now=1.0)
    assert not cache.on_current(lambda model: look_up_documents(model, ["old"]))["old"].is_cached
    summary = cache.precache([StoredDocument("old"), StoredDocument("none")])
    assert [f.code for f in summary.failures] == ["document_not_found"]
    assert (summary.documents, summary.updated) == (1, 1)
    document = cache.get("old")
    assert document.tokenizer == runtime.model.tokenizer.digest
    assert (document.metadata, document.version) == ({"k": 1}, 1)
    assert document.expires_at is not None
    assert cache.on_current(lambda model: look_up_documents(model, ["old"]))["old"].is_cached
    estimate = cache.estimate_precache([StoredDocument("old"), StoredDocument("none")])
    assert (estimate.documents, estimate.new_chunks, len(estimate.failures)) == (1, 0, 1)
