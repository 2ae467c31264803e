"""``chunkcache serve``: on loopback alone, and ready when it says so."""

import json
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from chunkcache.testing import write_tiny_model
from chunkcache_api.cli.serve import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_loopback_addresses_are_known(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "host.example", "", "127.1"])
def test_other_addresses_are_refused(cli_json, host: str, store: Path) -> None:
    body = cli_json("serve", "--host", host, exit_code=1)
    assert body["error"]["code"] == "not_loopback"
    assert "API keys" in body["error"]["message"]
    assert not store.exists()


def test_keys_that_are_set_and_not_there_are_an_error(cli_json, tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    body = cli_json("serve", "--host", "0.0.0.0", "--keys-file", path, exit_code=1)
    assert body["error"]["code"] == "keys_file"


def test_with_keys_other_addresses_are_listened_on(cli_json, start_cli) -> None:
    made = cli_json("keys", "create", "--tenant", "acme", "--scope", "query")
    process = start_cli("serve", "--host", "0.0.0.0", "--port", "0", "--no-retriever", "--json")
    assert process.stdout is not None
    lines = []
    while not lines or lines[-1].rstrip() != "}":
        lines.append(process.stdout.readline())
        assert lines[-1], process.communicate()
    body = json.loads("".join(lines))
    assert body["requires_api_key"] is True
    url = body["url"].replace("0.0.0.0", "127.0.0.1")
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        assert client.get("/v1/documents").status_code == 401
        headers = {"authorization": f"Bearer {made['key']}"}
        assert client.get("/v1/documents", headers=headers).json()["data"] == []
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert made["key"] not in stderr


def test_a_port_in_use_is_an_error(cli_json) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        body = cli_json("serve", "--port", str(other.getsockname()[1]), exit_code=1)
    assert body["error"]["code"] == "address"


def test_more_workers_are_not_offered(cli) -> None:
    assert cli("serve", "--workers", "2").exit_code == 2


def test_a_server_says_where_it_is_once_it_is_ready_and_ends_on_a_signal(start_cli) -> None:
    process = start_cli("serve", "--port", "0", "--no-retriever", "--verify-rate", "1", "--json")
    assert process.stdout is not None
    lines = []
    while not lines or lines[-1].rstrip() != "}":
        lines.append(process.stdout.readline())
        assert lines[-1], process.communicate()
    body = json.loads("".join(lines))
    assert body["requires_api_key"] is False
    with httpx.Client(base_url=body["url"], trust_env=False, timeout=60) as client:
        assert client.get("/readyz").status_code == 200
        put = client.put("/v1/documents/note", json={"text": "The PIN is 4017."})
        assert put.status_code == 201
        query = {"query": "What is the PIN?", "document_ids": ["note"], "max_tokens": 4}
        assert client.post("/v1/query", json=query).json()["object"] == "chunkcache.answer"
        assert "\nchunkcache_verify_sampled_total" in client.get("/metrics").text
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert stdout == ""


def test_a_model_that_cannot_be_loaded_ends_the_server(start_cli, tmp_path: Path) -> None:
    process = start_cli("serve", "--port", "0", "--json", "--model", tmp_path / "none")
    stdout, stderr = process.communicate()
    assert process.returncode == 1, stderr
    assert json.loads(stdout)["error"]["code"] == "model_files"
    assert stderr.splitlines()[-1].startswith("error: ")


def test_a_hangup_loads_a_changed_model_again(
    start_cli, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(model_dir(max_position_embeddings=2048), tmp_path / "served"))
    process = start_cli("serve", "--port", "0", "--no-retriever", "--json", "--model", model)
    assert process.stdout is not None
    assert process.stderr is not None
    lines = []
    while not lines or lines[-1].rstrip() != "}":
        lines.append(process.stdout.readline())
        assert lines[-1], process.communicate()
    url = json.loads("".join(lines))["url"]
    write_tiny_model(model, seed=5, max_position_embeddings=2048)
    process.send_signal(signal.SIGHUP)
    logged = process.stderr.readline()
    while "event=reloaded" not in logged:
        logged = process.stderr.readline()
        assert logged
    assert " changed " in logged
    (shown,) = httpx.get(f"{url}/v1/models", trust_env=False, timeout=60).json()["data"]
    assert shown["digest"] in logged
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr
