"""Generated requests: whatever comes, an answer or a declared refusal, and nothing left over."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from chunkcache.runtime import Runtime
from chunkcache_api.app import create_app
from chunkcache_retriever.retriever import Retriever
from chunkcache_retriever.testing import FixedEmbedder

DECLARED = {200, 201, 202, 400, 404, 409, 413, 415, 422, 429, 507}

TEXTS = st.one_of(
    st.sampled_from(
        [
            "",
            " ",
            "handbook",
            "tiny-llama",
            "user",
            "x" * 3_000,
            "\x00",
            "\ud800",
            "a/b",
            "..",
            "é\u2028",
        ]
    ),
    st.text(max_size=12),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(allow_nan=True, allow_infinity=True),
    TEXTS,
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
PARTS = st.sampled_from(
    [
        {"type": "input_text", "text": "Which code?"},
        {"type": "input_file", "file_id": "handbook"},
        {"type": "input_file", "file_id": "none"},
        {"type": "output_text", "text": "42", "annotations": []},
        {"type": "input_image", "image_url": "data:"},
    ]
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"])},
        optional={"content": st.one_of(TEXTS, st.lists(PARTS, max_size=3), VALUES)},
    ),
    max_size=3,
)


def some_of(**fields: Any) -> Any:
    """Objects with some of the fields: as they should be, or with any value at all."""
    return st.fixed_dictionaries({}, optional={k: st.one_of(v, VALUES) for k, v in fields.items()})


DOCUMENT = some_of(
    id=TEXTS,
    text=TEXTS,
    metadata=st.dictionaries(TEXTS, SCALARS, max_size=2),
    format=st.sampled_from(["text", "markdown"]),
    ttl_seconds=st.floats(-1, 100),
)
IDS = st.lists(TEXTS, max_size=3)
ALMOST_SOUND = st.fixed_dictionaries(
    {
        "model": st.just("tiny-llama"),
        "input": st.one_of(TEXTS, st.just([{"role": "user", "content": "Which code?"}]), MESSAGES),
        "max_output_tokens": st.just(2),
    },
    optional={
        "stream": st.booleans(),
        "instructions": TEXTS,
        "temperature": st.floats(-1, 3),
        "documents": st.just([{"id": "handbook"}]),
    },
)
BODIES: dict[str, Any] = {
    "/v1/responses": ALMOST_SOUND
    | some_of(
        model=st.just("tiny-llama"),
        input=st.one_of(TEXTS, MESSAGES),
        max_output_tokens=st.just(2),
        stream=st.booleans(),
        text=some_of(format=some_of(type=st.sampled_from(["text", "json_object"]))),
        include=st.just(["message.output_text.logprobs"]),
        top_logprobs=st.integers(0, 3),
        instructions=TEXTS,
        metadata=st.dictionaries(TEXTS, TEXTS, max_size=2),
        chunkcache=some_of(policy=st.sampled_from(["full", "none"]), dry_run=st.booleans()),
    ),
    "/v1/documents/lookup": some_of(document_ids=IDS, texts=IDS),
    "/v1/precache": some_of(documents=st.lists(DOCUMENT, max_size=2), document_ids=IDS),
    "/v1/vector_stores": some_of(
        name=TEXTS,
        description=TEXTS,
        metadata=st.dictionaries(TEXTS, TEXTS, max_size=2),
        file_ids=st.just(["handbook"]),
    ),
    "/v1/vector_stores/{store}": some_of(name=TEXTS, metadata=VALUES),
    "/v1/vector_stores/{store}/files": some_of(
        file_id=st.sampled_from(["handbook", "none"]),
        attributes=st.dictionaries(TEXTS, SCALARS, max_size=2),
    ),
    "/v1/vector_stores/{store}/files/handbook": some_of(attributes=VALUES),
    "/v1/vector_stores/{store}/search": some_of(
        query=st.one_of(TEXTS, IDS),
        max_num_results=st.integers(0, 60),
        filters=some_of(type=st.just("eq"), key=TEXTS, value=SCALARS),
        ranking_options=some_of(score_threshold=st.floats(0, 1)),
    ),
    "/v1/cache/clear": some_of(tiers=st.lists(st.sampled_from(["host", "disk"]), max_size=3)),
    "/v1/cache/gc": some_of(dry_run=st.booleans(), drop_models=IDS),
    "/v1/jobs/job_no/cancel": VALUES,
}


@pytest.fixture(scope="module")
def client(runtime: Runtime, serve: Any) -> Iterator[httpx.Client]:
    app = create_app(runtime, retriever_factory=lambda c: Retriever(c, FixedEmbedder()))
    with serve(app) as opened:
        yield opened


@pytest.fixture(scope="module")
def store(client: httpx.Client, handbook: str) -> str:
    return client.post("/v1/vector_stores", json={"file_ids": [handbook]}).json()["id"]


def check(response: httpx.Response) -> None:
    assert response.status_code in DECLARED, (response.status_code, response.text)
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] != "internal_error"
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        assert "internal_error" not in response.text


@pytest.mark.parametrize("path", BODIES)
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_body(client: httpx.Client, store: str, path: str, data: st.DataObject) -> None:
    body = data.draw(BODIES[path])
    with capture_logs():
        check(
            client.post(
                path.replace("{store}", store),
                content=json.dumps(body),
                headers={"content-type": "application/json"},
            )
        )


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(lines=st.lists(st.one_of(DOCUMENT.map(json.dumps), st.text(max_size=8)), max_size=4))
def test_any_lines(client: httpx.Client, lines: list[str]) -> None:
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    headers = {"content-type": "application/x-ndjson"}
    response = client.post("/v1/documents", content=data, headers=headers)
    check(response)
    *results, last = map(json.loads, response.text.split("\n")[:-1])
    assert last["object"] == "chunkcache.bulk_result"
    assert sum(r["status"] == "failed" for r in results) == last["failed"]
    assert len(results) == last["failed"] + last["documents"]


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.binary(max_size=60), name=st.text(min_size=1, max_size=20), field=TEXTS)
def test_any_upload(client: httpx.Client, data: bytes, name: str, field: str) -> None:
    try:
        files = {"file": (name, data), "purpose": (None, field or "user_data")}
        request = client.build_request("POST", "/v1/files", files=files)
        request.read()
    except UnicodeEncodeError:
        return  # what the client itself cannot send
    check(client.send(request))
    check(client.post("/v1/files", files={"file": (name, data)}, data={"purpose": "user_data"}))


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    path=st.sampled_from(
        ["files", "vector_stores", "jobs", "vector_stores/{store}/files", "models"]
    ),
    name=st.binary(max_size=12),
    suffix=st.sampled_from(["", "/content", "?limit=0", "?after=x", "?order=x", "?x=1"]),
    method=st.sampled_from(["GET", "DELETE"]),
)
def test_any_path(
    client: httpx.Client, store: str, path: str, name: bytes, suffix: str, method: str
) -> None:
    encoded = "".join(f"%{b:02X}" for b in name)
    if encoded or method == "GET":
        url = f"/v1/{path.replace('{store}', store)}/{encoded}{suffix}"
        response = client.request(method, url)
        assert response.status_code in DECLARED | {405}, (url, response.text)


def test_nothing_is_left_over(client: httpx.Client, runtime: Runtime, wait_until: Any) -> None:
    def unfinished() -> list[str]:
        jobs = client.get("/v1/jobs", params={"limit": 100}).json()["data"]
        return [j["id"] for j in jobs if j["status"] in ("queued", "running")]

    wait_until(lambda: not unfinished())
    assert runtime.engine.num_open_requests == 0
    assert runtime.pool.num_free_pages == runtime.pool.num_pages
    assert runtime.stack.stats().leases_open == 0
    runtime.stack.check_integrity()
    for job in client.get("/v1/jobs", params={"limit": 100}).json()["data"]:
        assert job["status"] == "completed", job
