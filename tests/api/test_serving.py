"""A server at work: loading, answering beside model work, clients that leave, stopping."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import httpx
import pytest
import torch
from fastapi import FastAPI

from chunkcache.chunk_cache import ChunkCache
from chunkcache.engine.decode import DecodeRow, DecodeTile
from chunkcache.errors import ModelFilesError
from chunkcache.planning import DocumentRef
from chunkcache.runtime import Runtime
from chunkcache_api.app import create_app
from chunkcache_api.service import served_model_name

MakeRuntime = Callable[..., Runtime]
Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]
WaitUntil = Callable[[Callable[[], bool]], None]
BusyEngine = Callable[[Runtime], AbstractContextManager[None]]

BODY = {"query": "What is the code of door 3?", "document_ids": ["handbook"]}


def test_it_lives_while_the_model_loads(
    make_runtime: MakeRuntime, serve: Serve, wait_until: WaitUntil
) -> None:
    may_load, opened = threading.Event(), []

    def open_runtime() -> Runtime:
        may_load.wait()
        opened.append(make_runtime())
        return opened[0]

    with serve(create_app(open_runtime)) as client:
        assert client.get("/livez").json() == {"status": "ok"}
        assert client.get("/version").json()["name"] == "chunkcache"
        for response in (
            client.get("/readyz"),
            client.get("/v1/models"),
            client.post("/v1/query", json=BODY),
            client.put("/v1/documents/x", json={"text": "x"}),
        ):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "model_loading"
            assert response.json()["error"]["type"] == "server_error"
            assert response.headers["retry-after"] == "1"
        may_load.set()
        wait_until(lambda: client.get("/readyz").status_code == 200)
        model = client.get("/v1/models").json()["data"][0]
        assert (model["id"], model["object"]) == ("tiny-llama", "model")
        assert "/" not in model["id"]
        assert (model["family"], model["gate"]["passed"]) == ("Llama", True)
    assert opened[0].engine.num_open_requests == 0
    with pytest.raises(Exception, match="stopping"):
        opened[0].engine.call(lambda: None)


def test_a_load_that_fails_is_told_without_a_path(serve: Serve, wait_until: WaitUntil) -> None:
    told = []

    def open_runtime() -> Runtime:
        raise ModelFilesError("no model directory at /secret/path")

    with serve(create_app(open_runtime, on_load_failure=told.append)) as client:
        wait_until(lambda: bool(told))
        response = client.get("/readyz")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "model_files"
        assert "secret" not in response.text
        assert client.get("/livez").status_code == 200
    assert isinstance(told[0], ModelFilesError)


def test_stopping_while_loading_closes_what_is_opened_later(
    make_runtime: MakeRuntime, serve: Serve, wait_until: WaitUntil
) -> None:
    may_load, opened = threading.Event(), []

    def open_runtime() -> Runtime:
        may_load.wait()
        opened.append(make_runtime())
        return opened[0]

    with serve(create_app(open_runtime)) as client:
        assert client.get("/readyz").status_code == 503
    may_load.set()
    wait_until(lambda: bool(opened) and not opened[0].engine._thread.is_alive())


def test_a_runtime_that_was_given_stays_open(make_runtime: MakeRuntime, serve: Serve) -> None:
    with make_runtime() as runtime:
        with serve(create_app(runtime)) as client:
            assert client.get("/readyz").json() == {
                "status": "ready",
                "model": "tiny-llama",
                "warnings": [],
            }
        assert runtime.engine.call(lambda: 7).result() == 7


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("demo", "demo"),
        ("org/model", "org/model"),
        ("/models/llama-3/", "llama-3"),
        ("/models/x.Q4.gguf", "x.Q4"),
        ("/", "model"),
    ],
)
def test_a_served_name_holds_no_path(model: str, name: str) -> None:
    assert served_model_name(model) == name


def test_it_lives_during_model_work(
    client: httpx.Client,
    runtime: Runtime,
    handbook: str,
    wait_until: WaitUntil,
    busy_engine: BusyEngine,
) -> None:
    """A05: streams, whole answers and long documents all wait for the engine; nothing else does."""
    long_text = " ".join(f"Line {n} of a long text." for n in range(40))

    def read_stream() -> str:
        with client.stream("POST", "/v1/query", json=BODY | {"stream": True}) as response:
            return response.read().decode()

    with ThreadPoolExecutor(3) as threads:
        with busy_engine(runtime):
            work = [
                threads.submit(read_stream),
                threads.submit(client.post, "/v1/query", json=BODY),
                threads.submit(client.put, "/v1/documents/long", json={"text": long_text}),
            ]
            wait_until(lambda: runtime.engine.num_open_requests == 2)
            wait_until(lambda: client.get("/v1/documents/long").status_code == 200)
            for path in ("/livez", "/readyz", "/v1/models", "/v1/documents"):
                assert client.get(path).status_code == 200
            assert not any(w.done() for w in work)
        assert "[DONE]" in work[0].result()
        assert work[1].result().status_code == 200
        assert work[2].result().status_code == 201


def test_it_lives_during_retrieval(runtime: Runtime, serve: Serve, handbook: str) -> None:
    """A05: a slow retriever (an embedding) holds up its own question only."""
    begun, may_end = threading.Event(), threading.Event()

    class SlowRetriever:
        def __init__(self, cache: ChunkCache) -> None:
            pass

        def retrieve(self, query: str, top_k: int, filters: object = None) -> Sequence[DocumentRef]:
            begun.set()
            may_end.wait()
            return [DocumentRef(handbook)]

    app = create_app(runtime, retriever_factory=SlowRetriever)
    with serve(app) as client, ThreadPoolExecutor(1) as threads:
        body = {"query": "q", "top_k": 1, "max_tokens": 2}
        answer = threads.submit(client.post, "/v1/query", json=body)
        begun.wait()
        assert client.get("/livez").status_code == 200
        assert client.post("/v1/query", json=BODY | {"max_tokens": 2}).status_code == 200
        assert not answer.done()
        may_end.set()
        assert answer.result().status_code == 200


@pytest.fixture
def num_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts decode steps, and makes them slow enough for a client to leave between them."""
    step, count, pause = DecodeTile.step, [0], threading.Event()

    def counted(self: DecodeTile, rows: Sequence[DecodeRow]) -> torch.Tensor:
        count[0] += 1
        pause.wait(0.005)
        return step(self, rows)

    monkeypatch.setattr(DecodeTile, "step", counted)
    return count


def is_idle(runtime: Runtime) -> bool:
    pool = runtime.engine._pool
    return runtime.engine.num_open_requests == 0 and pool.num_free_pages == pool.num_pages


@pytest.mark.parametrize("fields", [{}, {"chunkcache": {"verify": True, "policy": "none"}}])
def test_a_reader_that_leaves_ends_the_work(
    client: httpx.Client,
    runtime: Runtime,
    handbook: str,
    num_steps: list[int],
    fields: dict,
    wait_until: WaitUntil,
) -> None:
    """A01: streams, closed behind the first event."""
    body = BODY | {"stream": True, "max_tokens": 1_000} | fields
    for _ in range(5):
        with client.stream("POST", "/v1/query", json=body) as response:
            assert next(response.iter_raw())
    wait_until(lambda: is_idle(runtime))
    assert num_steps[0] < 1_000
    assert runtime.stack.stats().leases_open == 0
    assert _live_threads(wait_until) == 0


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_a_conversation_ends_every_answer(
    client: httpx.Client,
    runtime: Runtime,
    handbook: str,
    num_steps: list[int],
    is_streamed: bool,
    wait_until: WaitUntil,
) -> None:
    """A01 and C14: three answers over shared pages, streamed or not."""
    body = {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": "What is the code of door 3?"}],
        "documents": [{"id": handbook}],
        "n": 3,
        "max_tokens": 1_000,
        "stream": is_streamed,
    }
    with httpx.Client(base_url=str(client.base_url), timeout=0.3, trust_env=False) as hasty:
        for _ in range(3):
            if is_streamed:
                with hasty.stream("POST", "/v1/chat/completions", json=body) as response:
                    assert next(response.iter_raw())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    hasty.post("/v1/chat/completions", json=body)
    wait_until(lambda: is_idle(runtime))
    assert num_steps[0] < 1_000
    assert _live_threads(wait_until) == 0


def test_a_client_that_leaves_a_whole_answer_ends_the_work(
    client: httpx.Client,
    runtime: Runtime,
    handbook: str,
    num_steps: list[int],
    wait_until: WaitUntil,
) -> None:
    """A01: not streaming."""
    base_url = str(client.base_url)
    for _ in range(3):
        with (
            httpx.Client(base_url=base_url, timeout=0.2, trust_env=False) as hasty,
            pytest.raises(httpx.ReadTimeout),
        ):
            hasty.post("/v1/query", json=BODY | {"max_tokens": 1_000})
    wait_until(lambda: is_idle(runtime))
    assert num_steps[0] < 1_000
    assert _live_threads(wait_until) == 0


def test_a_client_that_leaves_during_the_comparison_ends_it(
    client: httpx.Client,
    runtime: Runtime,
    handbook: str,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: WaitUntil,
) -> None:
    """A01: the answer is complete, its full prefill is under way."""
    finished = threading.Event()
    count, step, pause = [0], DecodeTile.step, threading.Event()

    def counted(self: DecodeTile, rows: Sequence[DecodeRow]) -> torch.Tensor:
        count[0] += 1
        if count[0] > 30:
            finished.set()
            pause.wait(0.005)
        return step(self, rows)

    monkeypatch.setattr(DecodeTile, "step", counted)
    body = BODY | {"stream": True, "max_tokens": 25, "chunkcache": {"verify": True}}
    with client.stream("POST", "/v1/query", json=body) as response:
        pieces = response.iter_raw()
        assert next(pieces)
        assert finished.wait(30)
    wait_until(lambda: is_idle(runtime))
    assert count[0] < 48


def test_more_than_fits_is_refused_at_once(
    make_runtime: MakeRuntime, serve: Serve, wait_until: WaitUntil, busy_engine: BusyEngine
) -> None:
    settings = {"max_queued_requests": 1, "decode_tile_rows": 1}
    with make_runtime(**settings) as runtime, serve(create_app(runtime)) as client:
        client.put("/v1/documents/handbook", json={"text": "Door 3 has the code 4017."})
        with ThreadPoolExecutor(2) as threads:
            with busy_engine(runtime):
                body = BODY | {"max_tokens": 2}
                accepted = [threads.submit(client.post, "/v1/query", json=body) for _ in range(2)]
                wait_until(lambda: runtime.engine.num_open_requests == 2)
                refused = client.post("/v1/query", json=BODY)
                assert refused.status_code == 429
                assert refused.headers["retry-after"] == "1"
                assert refused.json()["error"]["code"] == "queue_full"
                assert refused.json()["error"]["type"] == "rate_limit_error"
            assert [a.result().status_code for a in accepted] == [200, 200]
        assert client.post("/v1/query", json=BODY | {"max_tokens": 2}).status_code == 200


def _live_threads(wait_until: WaitUntil) -> int:
    def count() -> int:
        return sum(t.name == "chunkcache-request" for t in threading.enumerate())

    wait_until(lambda: count() == 0)
    return count()
