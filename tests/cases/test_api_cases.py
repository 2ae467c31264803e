"""Case tests of area A, and C12 and C15: what clients do to a server."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from chunkcache.chunk_cache import ChunkCache
from chunkcache.engine.decode import DecodeTile
from chunkcache.errors import ChunkCacheError
from chunkcache.planning import AskOptions
from chunkcache_api.app import create_app

TEXT = " ".join(f"Locker {n} holds bag {n * 17 % 83}." for n in range(12))
QUESTION = "Which bag is in locker 3?"
ENDPOINTS = ("/v1/query", "/v1/chat/completions", "/v1/responses")

WaitUntil = Callable[[Callable[[], bool]], None]


@pytest.fixture
def cache(open_cache: Callable[..., ChunkCache]) -> ChunkCache:
    cache = open_cache()
    cache.put("lockers", TEXT)
    return cache


@pytest.fixture
def client(cache: ChunkCache, serve: Any) -> Iterator[httpx.Client]:
    with serve(create_app(cache.runtime, max_body_bytes=1 << 20)) as client:
        yield client


def body_of(endpoint: str, max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """The same question over the same document, in each endpoint's form."""
    model = {"model": "model", "temperature": 0}
    if endpoint == "/v1/query":
        asked = {"query": QUESTION, "document_ids": ["lockers"], "max_tokens": max_tokens}
        return asked | fields
    if endpoint == "/v1/chat/completions":
        parts = [
            {"type": "file", "file": {"file_id": "lockers"}},
            {"type": "text", "text": QUESTION},
        ]
        asked = {"messages": [{"role": "user", "content": parts}], "max_tokens": max_tokens}
        return model | asked | fields
    parts = [{"type": "input_file", "file_id": "lockers"}, {"type": "input_text", "text": QUESTION}]
    asked = {"input": [{"role": "user", "content": parts}], "max_output_tokens": max_tokens}
    return model | asked | fields


def post(client: httpx.Client, endpoint: str, **fields: Any) -> httpx.Response:
    return client.post(endpoint, json=named(client, body_of(endpoint, **fields)))


def named(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    served = client.get("/v1/models").json()["data"][0]["id"]
    return body | ({"model": served} if "model" in body else {})


def text_of(endpoint: str, body: dict[str, Any]) -> str:
    if endpoint == "/v1/query":
        return body["answer"]
    if endpoint == "/v1/chat/completions":
        return body["choices"][0]["message"]["content"]
    return body["output"][0]["content"][0]["text"]


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    data = [x.removeprefix("data: ") for x in response.text.splitlines() if x.startswith("data: ")]
    return [json.loads(d) for d in data if d != "[DONE]"]


def delta_of(event: dict[str, Any]) -> str:
    if event.get("type") == "response.output_text.delta":
        return event["delta"]
    choices = event.get("choices") or [{"delta": {}}]
    return choices[0]["delta"].get("content") or ""


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_A01_a_reader_that_leaves_ends_its_answer(
    client: httpx.Client, cache: ChunkCache, wait_until: WaitUntil, endpoint: str
) -> None:
    engine, pool = cache.runtime.engine, cache.runtime.pool
    body = named(client, body_of(endpoint, 1_000, stream=True))
    for _ in range(10):
        with client.stream("POST", endpoint, json=body) as response:
            assert next(response.iter_lines())
    wait_until(lambda: engine.num_open_requests == 0)
    wait_until(lambda: pool.num_free_pages == pool.num_pages)
    assert cache.runtime.stack.stats().leases_open == 0


@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        *((endpoint, "application/json") for endpoint in ENDPOINTS),
        ("/v1/documents", "application/x-ndjson"),
        ("/v1/files", "multipart/form-data; boundary=b"),
        ("/v1/documents/lookup", "application/json"),
        ("/v1/precache", "application/json"),
        ("/v1/vector_stores", "application/json"),
    ],
)
def test_A03_a_body_has_a_limit(client: httpx.Client, path: str, media_type: str) -> None:
    """Declared or not, what is over the limit is refused before it is in memory."""

    def pieces() -> Iterator[bytes]:
        for _ in range(64):
            yield b"x" * 65_536

    headers = {"content-type": media_type}
    declared = client.post(path, content=b"x" * (2 << 20), headers=headers)
    assert declared.status_code == 413
    try:
        undeclared = client.post(path, content=pieces(), headers=headers)
        assert undeclared.status_code in (400, 413)
    except (httpx.WriteError, httpx.ReadError):
        pass  # the server has answered and closed while the client was still sending
    assert client.get("/livez").status_code == 200


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_A03_nesting_has_a_limit(client: httpx.Client, endpoint: str) -> None:
    deep = b'{"metadata": ' + b'{"a": ' * 100_000 + b"1" + b"}" * 100_000 + b"}"
    response = client.post(endpoint, content=deep, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_value"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_A06_a_failure_behind_the_headers_is_no_success(
    client: httpx.Client, cache: ChunkCache, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    step, steps = DecodeTile.step, iter(range(5))

    def failing(self: DecodeTile, *args: Any) -> Any:
        if next(steps, None) is None:
            raise RuntimeError("injected at the fifth token")
        return step(self, *args)

    monkeypatch.setattr(DecodeTile, "step", failing)
    with capture_logs() as lines:
        response = post(client, endpoint, max_tokens=32, stream=True)
        whole = post(client, endpoint, max_tokens=32)
    assert "request_failed" in {line["event"] for line in lines}
    assert response.status_code == 200
    assert "[DONE]" not in response.text
    assert "injected" not in response.text
    events = events_of(response)
    assert not any("completed" in str(e.get("type")) for e in events)
    assert "error" in events[-1] or events[-1]["type"] == "response.failed"
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "internal_error")
    assert cache.runtime.meter.stats().outcomes["internal_error"] == 2
    monkeypatch.undo()
    assert post(client, endpoint).status_code == 200


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_A07_a_stream_is_the_same_text(client: httpx.Client, endpoint: str) -> None:
    whole = text_of(endpoint, post(client, endpoint, max_tokens=24).json())
    streamed = post(client, endpoint, max_tokens=24, stream=True)
    assert "".join(map(delta_of, events_of(streamed))) == whole


ODD_FIELDS: tuple[dict[str, Any], ...] = (
    {"temperature": -1},
    {"temperature": 1e9},
    {"temperature": "hot"},
    {"top_p": 0},
    {"top_k": 0},
    {"stop": ["x"] * 10_000},
    {"seed": 1 << 70},
    {"logit_bias": {"999999999": 1}},
    {"stop_token_ids": [1 << 40]},
    {"stream": "yes"},
    {"chunkcache": {"policy": "nonsense"}},
    {"chunkcache": {"recompute_ratio": 2}},
)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_A08_odd_parameters_hurt_nobody_else(
    client: httpx.Client, cache: ChunkCache, endpoint: str
) -> None:
    good = text_of(endpoint, post(client, endpoint).json())
    name = "max_output_tokens" if endpoint == "/v1/responses" else "max_tokens"
    odd = [*ODD_FIELDS, *({name: n} for n in (0, -1, 10**12, "5", 1.5))]
    with ThreadPoolExecutor(4) as pool:
        refused = [pool.submit(post, client, endpoint, **fields) for fields in odd]
        others = [pool.submit(post, client, endpoint) for _ in range(4)]
    for fields, future in zip(odd, refused, strict=True):
        response = future.result()
        assert response.status_code == 400, (fields, response.text)
        assert response.json()["error"]["param"], fields
    assert {text_of(endpoint, f.result().json()) for f in others} == {good}
    raw = json.dumps(named(client, body_of(endpoint))).replace('"temperature": 0', '"x": 0')
    headers = {"content-type": "application/json"}
    not_a_number = client.post(
        endpoint, content=raw[:-1] + ', "temperature": NaN}', headers=headers
    )
    assert not_a_number.status_code == 400
    assert cache.runtime.engine.num_open_requests == 0
    assert cache.runtime.pool.num_free_pages == cache.runtime.pool.num_pages


def test_A08_one_document_a_thousand_times(client: httpx.Client) -> None:
    body = body_of("/v1/query", document_ids=["lockers"] * 1_000)
    response = client.post("/v1/query", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "document_ids")
    unknown = client.post("/v1/query", json=body_of("/v1/query", document_ids=["none"]))
    assert unknown.status_code == 404


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_A09_equal_request_ids_are_two_requests(client: httpx.Client, endpoint: str) -> None:
    body = named(client, body_of(endpoint, 16))
    headers = {"x-request-id": "a"}
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: client.post(endpoint, json=body, headers=headers), range(2)))
    assert [r.headers["x-request-id"] for r in both] == ["a", "a"]
    first, second = (r.json() for r in both)
    assert first["id"] != second["id"]
    assert text_of(endpoint, first) == text_of(endpoint, second)


HOSTILE_NAMES = ("../../x", "/etc/passwd", "..%2f..%2fx", "a/../../b", "C:\\x", "x\x00.txt")


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_A10_names_name_no_files(
    client: httpx.Client, cache: ChunkCache, tmp_path: Any, name: str
) -> None:
    """As an id, in bulk and in jobs, and as a file's name: opaque, or refused."""
    before = {p for p in tmp_path.rglob("*") if "store" not in p.parts[-2:]}
    encoded = "".join(f"%{b:02X}" for b in name.encode())
    is_acceptable = "\x00" not in name
    put = client.put(f"/v1/documents/{encoded}", json={"text": "Words."})
    assert put.status_code == (201 if is_acceptable else 400)
    line = json.dumps({"id": name, "text": "Words."})
    bulk = client.post(
        "/v1/documents", content=line, headers={"content-type": "application/x-ndjson"}
    )
    status = json.loads(bulk.text.splitlines()[0])["status"]
    assert status == ("unchanged" if is_acceptable else "failed")
    file = client.post(
        "/v1/files", files={"file": (name, b"Words.")}, data={"purpose": "user_data"}
    )
    if file.status_code == 200:
        assert "/" not in file.json()["id"]
    else:
        assert file.status_code == 400
    if is_acceptable:
        assert client.get(f"/v1/files/{encoded}/content").text == "Words."
        assert client.delete(f"/v1/files/{encoded}").json()["deleted"]
    assert {p for p in tmp_path.rglob("*") if "store" not in p.parts[-2:]} == before


def test_C12_what_never_fits_is_refused_and_what_fits_in_turn_is_served(
    open_cache: Callable[..., ChunkCache],
) -> None:
    cache = open_cache(pool_tokens=160, page_tokens=16)
    with pytest.raises(ChunkCacheError) as caught:
        cache.answer("x " * 400, [], max_tokens=8)
    assert (caught.value.code, caught.value.status) == ("context_length_exceeded", 400)
    words = "one two three four five six seven eight nine ten " * 2
    asked = AskOptions(max_tokens=8)
    num_tokens = cache.plan(words, [], asked).layout.num_tokens
    assert 80 < num_tokens + 8 <= 160, "two do not fit at once"
    alone = cache.answer(words, [], options=asked).text
    with ThreadPoolExecutor(3) as pool:
        texts = list(pool.map(lambda _: cache.answer(words, [], options=asked).text, range(3)))
    assert texts == [alone] * 3


def test_C15_a_second_worker_is_refused() -> None:
    """One process owns the model and the store; there is no option to have it done by two."""
    from chunkcache_api.cli.app import app

    result = CliRunner().invoke(app, ["serve", "--workers", "2"])
    assert result.exit_code == 2
    assert "--workers" in result.output
