"""``POST /v1/models/reload``: new weights answer next, and a failure leaves the old ones serving."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry.trace import NoOpTracer

from chunkcache.runtime import Runtime
from chunkcache.testing import write_tiny_adapter, write_tiny_model
from chunkcache_api.app import create_app
from chunkcache_api.chat_work import ChatWork
from chunkcache_api.schemas.chat import ChatRequest
from chunkcache_api.service import Service, system_fingerprint
from chunkcache_api.workers import WorkerScope

Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]
PATH = "/v1/models/reload"
QUERY = {"query": "What is the PIN?", "document_ids": ["note"], "max_tokens": 4}


@pytest.fixture
def model(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "served"))


def _model(client: httpx.Client) -> dict[str, Any]:
    (model,) = client.get("/v1/models").json()["data"]
    return model


def _sources(client: httpx.Client) -> set[str]:
    answer = client.post("/v1/query", json=QUERY).json()
    return {d["source"] for d in answer["chunkcache"]["documents"]}


def test_new_weights_answer_next(
    make_runtime: Callable[..., Runtime], serve: Serve, model: Path
) -> None:
    with make_runtime(model=str(model)) as runtime, serve(create_app(runtime)) as client:
        client.put("/v1/documents/note", json={"text": "The PIN is 4017."})
        assert _sources(client) == {"host"}
        before = _model(client)
        unchanged = client.post(PATH, json={})
        assert unchanged.status_code == 200
        assert not unchanged.json()["changed"]
        write_tiny_model(model, seed=7, max_position_embeddings=2048)
        body = client.post(PATH, json={}).json()
        assert body["object"] == "chunkcache.model_reload"
        assert body["changed"]
        assert body["previous_digest"] == before["digest"]
        after = _model(client)
        assert after["digest"] == body["digest"] != before["digest"]
        assert after["gate"]["passed"]
        assert _sources(client) == {"computed"}
        assert "chunkcache_requests_total" in client.get("/metrics").text
        assert runtime.current is not runtime


def test_an_answer_names_the_model_that_gave_it(
    make_runtime: Callable[..., Runtime], model: Path
) -> None:
    """A conversation that came before a reload, and was begun behind it."""
    request = ChatRequest.model_validate(
        {"model": "served", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 1}
    )
    with make_runtime(model=str(model)) as runtime:
        service = Service.over(runtime, None, NoOpTracer())
        work = ChatWork(service, request)
        write_tiny_model(model, seed=7, max_position_embeddings=2048)
        assert runtime.reload(lambda line: None).changed
        events: list[Any] = []
        work.answer(WorkerScope(events.append))
        named = events[-1].body["system_fingerprint"]
        assert named == system_fingerprint(runtime.current) != system_fingerprint(runtime)


def test_a_failure_leaves_the_old_model_serving_and_says_so(
    make_runtime: Callable[..., Runtime], serve: Serve, model: Path
) -> None:
    with make_runtime(model=str(model)) as runtime, serve(create_app(runtime)) as client:
        client.put("/v1/documents/note", json={"text": "The PIN is 4017."})
        before = _model(client)
        (model / "model.safetensors").unlink()
        refused = client.post(PATH, json={})
        assert refused.status_code == 409
        error = refused.json()["error"]
        assert error["code"] == "reload_failed"
        assert "goes on serving" in error["message"]
        assert str(model) not in refused.text
        assert _model(client) == before
        assert _sources(client) == {"host"}
        assert client.get("/readyz").status_code == 200


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        ({}, 415, "unsupported_media_type"),
        ({"json": {"model": "another"}}, 400, "unsupported_parameter"),
        ({"json": []}, 400, "invalid_value"),
    ],
)
def test_bodies_that_are_refused(
    client: httpx.Client, request_: dict[str, Any], status: int, code: str
) -> None:
    """A page in a browser can send a form to this address, and no JSON."""
    response = client.post(PATH, **request_)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


def test_the_adapter_and_the_rounding_are_shown(
    make_runtime: Callable[..., Runtime], serve: Serve, model: Path, tmp_path: Path
) -> None:
    adapter = write_tiny_adapter(tmp_path / "support", model)
    settings = {"model": str(model), "adapter": str(adapter), "quantisation": "int8"}
    with make_runtime(**settings) as runtime, serve(create_app(runtime)) as client:
        shown = _model(client)
        assert shown["id"] == "served"
        assert shown["dtype"] == "float32"
        assert shown["quantisation"] == "int8"
        assert shown["adapter"]["name"] == "support"
        assert len(shown["adapter"]["digest"]) == 64
        assert shown["gate"]["model_name"] == "served+support"
