"""Errors have one form on every path, ids of requests are checked, bodies are bounded."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from chunkcache_api.body_limit import BodyLimit
from chunkcache_api.errors import BodyTooLargeError

LIMIT_BYTES = 1 << 20


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1/nowhere", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/v1/query", 405, "method_not_allowed"),
        ("POST", "/v1/documents/x", 405, "method_not_allowed"),
        ("POST", "/livez", 405, "method_not_allowed"),
        ("POST", "/v1/query/", 404, "not_found"),
        ("GET", "/v1/documents/none", 404, "document_not_found"),
        ("POST", "/v1/query", 415, "unsupported_media_type"),
    ],
)
def test_every_error_has_the_same_form(
    client: httpx.Client, method: str, path: str, status: int, code: str
) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["type"] == "invalid_request_error"
    assert response.headers["x-request-id"]
    if status == 405:
        assert response.headers["allow"]


def test_a_request_id_is_echoed_if_harmless(client: httpx.Client) -> None:
    given = client.get("/livez", headers={"x-request-id": "Trace-1.a_b"})
    assert given.headers.get_list("x-request-id") == ["Trace-1.a_b"]
    made = client.get("/livez").headers["x-request-id"]
    assert made.startswith("req_")
    assert client.get("/livez").headers["x-request-id"] != made


@pytest.mark.parametrize("value", [b"", b"a b", b"a" * 129, b"<x>", b"a\tb", b"\xc4", b"a,b"])
def test_a_harmful_request_id_is_replaced(client: httpx.Client, value: bytes) -> None:
    response = client.get("/nowhere", headers=[(b"x-request-id", value)])
    assert response.headers["x-request-id"].startswith("req_")


def test_two_request_ids_are_replaced(client: httpx.Client) -> None:
    headers = [("x-request-id", "a"), ("x-request-id", "b")]
    assert client.get("/livez", headers=headers).headers["x-request-id"].startswith("req_")


def test_equal_request_ids_do_not_collide(client: httpx.Client, handbook: str) -> None:
    """A09. Answers are drawn, not greedy: a tiny model's greedy answers to two questions may agree."""
    both = threading.Barrier(2)

    def body(question: str) -> dict[str, object]:
        drawn = {"max_tokens": 20, "temperature": 1.0, "seed": 7}
        return {"query": question, "document_ids": [handbook]} | drawn

    def ask(question: str) -> httpx.Response:
        both.wait()
        return client.post("/v1/query", json=body(question), headers={"x-request-id": "a"})

    def ask_alone(question: str) -> dict:
        return client.post("/v1/query", json=body(question)).json()

    questions = ["What is the code of door 1?", "Who keeps the key to the tower?"]
    with ThreadPoolExecutor(2) as threads:
        responses = list(threads.map(ask, questions))
    assert [r.headers["x-request-id"] for r in responses] == ["a", "a"]
    answers = [r.json() for r in responses]
    assert answers[0]["id"] != answers[1]["id"]
    expected = [ask_alone(q)["answer"] for q in questions]
    assert [a["answer"] for a in answers] == expected
    assert expected[0] != expected[1]


def _send(client: httpx.Client, head: bytes, *, pieces: int = 0) -> bytes:
    """Send a request by hand, and read its answer."""
    address = (client.base_url.host, client.base_url.port)
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(head)
        piece = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
        try:
            for _ in range(pieces):
                connection.sendall(piece)
            if pieces:
                connection.sendall(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            assert pieces
        answer = b""
        while b"}}" not in answer and (received := connection.recv(65_536)):
            answer += received
        return answer


HEAD = b"%s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n%s\r\n\r\n"
CHUNKED = b"transfer-encoding: chunked"


@pytest.mark.parametrize("target", [b"POST /v1/query", b"PUT /v1/documents/x", b"POST /nowhere"])
def test_a_body_declared_too_large_is_refused_unread(client: httpx.Client, target: bytes) -> None:
    """A03: the answer comes before one byte of the body."""
    answer = _send(client, HEAD % (target, b"content-length: 209715200"))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"body_too_large"' in answer
    assert b"x-request-id: req_" in answer


@pytest.mark.parametrize("target", [b"POST /v1/query", b"PUT /v1/documents/x"])
def test_an_undeclared_body_is_refused_once_it_is_too_large(
    client: httpx.Client, target: bytes
) -> None:
    """A03."""
    answer = _send(client, HEAD % (target, CHUNKED), pieces=200)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"body_too_large"' in answer
    assert client.get("/livez").status_code == 200


def test_a_body_at_the_limit_is_read(client: httpx.Client) -> None:
    body = b" " * (LIMIT_BYTES - 2) + b"{}"
    headers = {"content-type": "application/json"}
    response = client.post("/v1/query", content=body, headers=headers)
    assert response.json()["error"]["param"] == "query"


async def test_no_more_is_received_than_the_limit() -> None:
    """A03: memory stays bounded by the limit and one message."""
    num_received = 0

    async def receive() -> Message:
        nonlocal num_received
        num_received += 1
        return {"type": "http.request", "body": b"x" * 10, "more_body": True}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while True:
            await receive()

    limit = BodyLimit(app, 95, {"/low": 25, "/high": 200})
    for path, expected in (("/", 10), ("/low", 3), ("/high", 10)):
        num_received = 0
        with pytest.raises(BodyTooLargeError):
            await limit({"type": "http", "headers": [], "path": path}, receive, send)
        assert num_received == expected


def test_the_schema_is_served_and_names_the_fields(client: httpx.Client) -> None:
    schema = client.get("/openapi.json").json()
    body = schema["paths"]["/v1/query"]["post"]["requestBody"]["content"]["application/json"]
    assert "document_ids" in body["schema"]["properties"]
    assert "$ref" not in str(body)
