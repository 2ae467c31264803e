"""Several processes over one store: what one writes the others see, and nobody loses anything.

C15: a second server shares the store by design; there is no state beside it that could differ.
"""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

QUERY = {"query": "Which code?", "max_tokens": 3}
StartServer = Callable[..., httpx.Client]


@pytest.fixture
def start_server(start_cli) -> Iterator[StartServer]:
    """Start a server as a process, and wait until it is ready; gives a client for it."""
    clients: list[httpx.Client] = []

    def start(*options: str) -> httpx.Client:
        process: subprocess.Popen[str] = start_cli(
            "serve", "--port", "0", "--no-retriever", "--json", *options
        )
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while lines[-1].rstrip() != "}":
            lines.append(process.stdout.readline())
            assert lines[-1], process.communicate()
        url = json.loads("".join(lines))["url"]
        clients.append(httpx.Client(base_url=url, trust_env=False, timeout=120))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


@contextmanager
def running(process: "subprocess.Popen[str]") -> Iterator["subprocess.Popen[str]"]:
    yield process
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr


def source(client: httpx.Client, document_id: str) -> str:
    """Where the document's tokens came from, for an answer over it."""
    response = client.post("/v1/query", json=QUERY | {"document_ids": [document_id]})
    assert response.status_code == 200, response.text
    (document,) = response.json()["chunkcache"]["documents"]
    return document["source"]


def test_a_server_sees_what_precache_writes_meanwhile(
    start_server,
    start_cli,
    cli_json,
    write_documents,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write_documents(30)
    monkeypatch.setenv("CHUNKCACHE_KEPT_PROMPTS_RATIO", "0")  # a repeat is to show its tier
    server = start_server()
    assert server.put("/v1/documents/own", json={"text": "The PIN is 4017."}).status_code == 201
    assert server.get("/v1/documents").json()["data"][0]["id"] == "own"
    with running(start_cli("precache", folder, "--json")) as job:
        seen = 0
        while job.poll() is None:
            listed = server.get("/v1/documents", params={"limit": 1000}).json()["data"]
            assert len(listed) >= seen + 1
            seen = len(listed) - 1
            # It answers over its own documents while the other writes, and writes itself.
            assert source(server, "own") in ("host", "disk")
            assert server.put("/v1/documents/own", json={"text": f"PIN {seen}."}).is_success
    listed = server.get("/v1/documents", params={"limit": 1000}).json()["data"]
    assert len(listed) == 31
    assert [source(server, d) for d in ("000.txt", "029.txt")] == ["disk", "disk"]
    body = cli_json("store", "verify")
    assert body["findings"] == []
    assert body["checked"]["documents"] == 31


def test_two_servers_share_one_store(start_server, cli_json) -> None:
    first, second = start_server(), start_server()
    text = "The code of the red door is 4017, and the light goes on at dusk."
    for writer, reader in ((first, second), (second, first)):
        assert writer.put("/v1/documents/door", json={"text": text}).is_success
        answers = [
            client.post("/v1/query", json=QUERY | {"document_ids": ["door"]}).json()
            for client in (writer, reader)
        ]
        assert answers[0]["answer"] == answers[1]["answer"]
        assert answers[1]["chunkcache"]["documents"][0]["source"] in ("host", "disk")
        assert writer.delete("/v1/documents/door").status_code == 200
        for client in (writer, reader):
            response = client.post("/v1/query", json=QUERY | {"document_ids": ["door"]})
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "document_not_found"
    assert cli_json("store", "verify")["findings"] == []


def test_a_server_that_only_reads(start_server, cli_json, write_documents, store: Path) -> None:
    folder = write_documents(3)
    cli_json("precache", folder)
    server = start_server("--read-only")
    assert source(server, "001.txt") == "disk"
    for request in (
        server.put("/v1/documents/new", json={"text": "text"}),
        server.delete("/v1/documents/001.txt"),
    ):
        assert request.status_code == 403
        assert request.json()["error"]["code"] == "store_read_only"
    # Another process may write: this one reads it at once.
    (folder / "new.txt").write_text("The new door has the code 77.", encoding="utf-8")
    assert cli_json("precache", folder)["created"] == 1
    assert source(server, "new.txt") == "disk"


def test_a_killed_process_leaves_no_reader_and_no_lock_behind(
    start_cli, cli_json, write_documents, store: Path
) -> None:
    folder = write_documents(2)
    process = start_cli("precache", folder, "--json")
    assert process.stderr is not None
    process.stderr.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert cli_json("precache", folder)["documents"] == 2
    assert cli_json("store", "gc")["entries"] == 0
    assert cli_json("store", "verify")["findings"] == []
