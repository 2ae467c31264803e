"""The service under load on a tiny model: what is asked, and that its report adds up.

No time is judged.
"""

import json
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner

from chunkcache.errors import InvalidValueError
from chunkcache.runtime import Runtime
from chunkcache.settings import Settings
from chunkcache_api.app import create_app
from chunkcache_eval.cli import app
from chunkcache_eval.datasets.records import Passage, Question
from chunkcache_eval.service.load import Asking, run_load
from chunkcache_eval.service.report import percentile, service_table
from chunkcache_eval.service.run import LoadPlan, measure_service
from chunkcache_eval.service.workload import (
    MAX_DOCUMENTS,
    MIN_DOCUMENTS,
    WorkDocument,
    WorkRequest,
    make_documents,
    make_workload,
)


def questions_of(num_passages: int) -> list[Question]:
    return [
        Question(
            f"q{n}",
            f"What is the code of door {n}?",
            (),
            (Passage(f"p{n}", f"The code of door {n} is {n * 37 % 1000}. " * 3),),
        )
        for n in range(num_passages)
    ]


@pytest.fixture
def base_url(settings: Settings, tmp_path: Path) -> Iterator[str]:
    """A server without documents."""
    values = {"store": tmp_path / "store", "min_fused_context_tokens": 0, "chunk_tokens": 32}
    values |= {"kept_prompts_ratio": 0.0}  # as eval service sets it
    with Runtime.open(settings.model_copy(update=values | {"min_mean_chunk_tokens": 0})) as runtime:
        config = uvicorn.Config(create_app(runtime), port=0, log_level="error", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                thread.join(0.01)
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def test_documents_are_passages_joined_until_they_are_long_enough() -> None:
    documents = make_documents(questions_of(9), max_documents=4, min_chars=100)
    texts = [p.text for q in questions_of(9) for p in q.passages]
    assert [d.text for d in documents] == ["\n\n".join(texts[i : i + 2]) for i in (0, 2, 4, 6)]
    with pytest.raises(InvalidValueError, match="a request needs 3"):
        make_documents(questions_of(4), max_documents=200, min_chars=100)


def test_requests_favour_popular_documents_and_repeat_one() -> None:
    documents = [WorkDocument(f"d{n:03}", "text") for n in range(200)]
    questions = questions_of(3)

    def make(seed: int) -> tuple[WorkRequest, ...]:
        return make_workload(
            questions, documents, num_requests=2_000, repeat_every=4, seed=seed
        ).requests

    requests = make(1)
    assert requests == make(1) != make(2)
    repeated = requests[::4]
    assert len(set(repeated)) == 1
    assert repeated[0].is_repeated
    others = [r for r in requests if not r.is_repeated]
    assert len(others) == 1_500
    sizes = {len(r.document_ids) for r in others}
    assert sizes == set(range(MIN_DOCUMENTS, MAX_DOCUMENTS + 1))
    assert all(len(set(r.document_ids)) == len(r.document_ids) for r in others)
    drawn = Counter(name for r in others for name in r.document_ids)
    ranks = [sum(drawn[f"d{n:03}"] for n in range(a, a + 20)) for a in (0, 20, 180)]
    assert ranks[0] > 2 * ranks[1] > 2 * ranks[2] > 0


def test_a_share_of_the_values() -> None:
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile(list(range(1, 101)), 0.99) == 99
    assert percentile([7], 0.99) == 7
    assert math.isnan(percentile([], 0.5))


def test_a_measurement_adds_up(base_url: str) -> None:
    questions = questions_of(20)
    workload = make_workload(
        questions, make_documents(questions, 10, 60), num_requests=8, repeat_every=3, seed=0
    )
    report = measure_service(base_url, workload, LoadPlan(4, 3, 2, 120.0))
    assert report.failed == 0, report.failures
    assert (report.leaked_pages, report.leaked_leases, report.leaked_requests) == (0, 0, 0)
    for side in (report.fused, report.full):
        assert (side.requests, side.cut_off, side.failed) == (8, 0, 0)
        assert (side.repeats, side.distinct_repeats) == (3, 1)
    assert report.identical
    assert report.throughput_ratio == report.fused.requests_s / report.full.requests_s
    assert report.ttft_ratio == report.full.ttft_ms / report.fused.ttft_ms
    assert report.fused.reused_ratio > 0.3
    assert report.full.reused_ratio == 0
    assert report.fused.fell_back == 0
    assert report.health_p99_ms > 0
    assert report.overhead_ms > 0 < report.idle_overhead_ms
    assert json.loads(json.dumps(report.to_dict()))["num_documents"] == 10
    assert len(service_table(report).rows) == 9


def test_what_is_not_answered_in_time_is_given_up(base_url: str) -> None:
    with httpx.Client(base_url=base_url, timeout=60, trust_env=False) as client:
        text = " ".join(f"The code of door {n} is {n * 37 % 1000}." for n in range(40))
        client.put("/v1/documents/doors", json={"text": text}).raise_for_status()
    request = WorkRequest("Which?", ("doors",))
    result = run_load(Asking(base_url, 3, 500, max_seconds=0.3), [request] * 60, "full")
    assert result.cut_off == 3
    assert result.failures == []
    assert result.completed < 60


def test_what_is_refused_is_counted_with_its_reason(base_url: str) -> None:
    asked = [WorkRequest("Where?", ("nowhere",)), WorkRequest("Where?", ("nowhere",), True)]
    result = run_load(Asking(base_url, 2, 3, 60.0), asked, "fused")
    assert result.completed == 0
    assert len(result.failures) == 2
    assert all("document_not_found" in reason for reason in result.failures)


def test_the_command_starts_a_server_and_ends_it(
    model_dir: Callable[..., Path], cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in os.environ if n.startswith("CHUNKCACHE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CHUNKCACHE_CACHE_DIR", str(cache_dir))
    data = tmp_path / "questions.jsonl"
    data.write_text(
        "".join(
            json.dumps(
                {
                    "id": q.question_id,
                    "question": q.question,
                    "chunks": [{"id": p.passage_id, "text": p.text} for p in q.passages],
                }
            )
            + "\n"
            for q in questions_of(6)
        )
    )
    args = ["eval", "service", "--data", data, "--document-chars", 60, "--clients", 2]
    args += ["--requests", 3, "--rounds", 1, "--max-tokens", 2, "--json"]
    args += ["--model", model_dir(max_position_embeddings=2048)]
    done = CliRunner().invoke(app, [str(a) for a in args])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["failed"] == report["leaked_pages"] == 0
    assert report["throughput_ratio"] > 0

    args[args.index("--model") + 1] = tmp_path / "no-model"
    failed = CliRunner().invoke(app, [str(a) for a in args])
    assert failed.exit_code == 1
    assert "the server did not start" in json.loads(failed.stdout)["error"]["message"]
