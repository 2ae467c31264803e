"""What the command line's tests share: commands run in this process or in one of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from typer.testing import CliRunner, Result

from chunkcache.catalog import Catalog
from chunkcache.chunk_cache import DEFAULT_TENANT
from chunkcache.documents import Document
from chunkcache.identity import tenant_namespace
from chunkcache.store.entry_format import decode_header
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.transaction import Database
from chunkcache_api.cli.app import app

Cli = Callable[..., Result]
CliJson = Callable[..., dict[str, Any]]
StartCli = Callable[..., "subprocess.Popen[str]"]
StoreContents = tuple[dict[str, Document], dict[tuple[int, ...], bytes]]
ReadStore = Callable[[Path], StoreContents]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Where the commands' store is, unless they are told otherwise."""
    return tmp_path / "store"


@pytest.fixture
def settings_env(
    model_dir: Callable[..., Path], cache_dir: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.MonkeyPatch]:
    """Settings of this test alone: a tiny model with room for long prompts, and its own store."""
    for name in [n for n in os.environ if n.startswith("CHUNKCACHE_")]:
        monkeypatch.delenv(name)
    values = {
        "MODEL": model_dir(max_position_embeddings=32_768),
        "STORE": store,
        "CACHE_DIR": cache_dir,
        "STORE_MAX_BYTES": 1 << 30,
        "MIN_FUSED_CONTEXT_TOKENS": 0,
        "MIN_MEAN_CHUNK_TOKENS": 0,
    }
    for name, value in values.items():
        monkeypatch.setenv(f"CHUNKCACHE_{name}", str(value))
    yield monkeypatch
    structlog.reset_defaults()


@pytest.fixture
def cli(settings_env: pytest.MonkeyPatch) -> Cli:
    """Run a command in this process."""

    def run(*args: str | Path) -> Result:
        result = CliRunner().invoke(app, [str(a) for a in args])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def cli_json(cli: Cli) -> CliJson:
    """Run a command with ``--json``; whatever is not exactly one object on stdout fails here."""

    def run(*args: str | Path, exit_code: int = 0) -> dict[str, Any]:
        result = cli(*args, "--json")
        assert result.exit_code == exit_code, result.output
        body = json.loads(result.stdout)
        assert isinstance(body, dict)
        return body

    return run


@pytest.fixture
def start_cli(settings_env: pytest.MonkeyPatch) -> Iterator[StartCli]:
    """Start a command as a process; what still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: str | Path) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-m", "chunkcache_api.cli", *map(str, args)],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            # Not as in this process, which has one: no bit may depend on it.
            | {"OMP_NUM_THREADS": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def write_documents(tmp_path: Path) -> Callable[[int], Path]:
    """Write a folder of documents of one chunk each, all different."""

    def write(num_documents: int) -> Path:
        folder = tmp_path / "docs"
        folder.mkdir()
        for i in range(num_documents):
            text = f"Door {i} opens at {i * 7 % 24} and its code is {i * 37 % 1000}. " * 3
            (folder / f"{i:03}.txt").write_text(text, encoding="utf-8")
        return folder

    return write


@pytest.fixture
def read_store() -> ReadStore:
    """The default tenant's documents, and every entry's numbers by its token ids."""

    def read(path: Path) -> StoreContents:
        with StoreEnvironment.open(path, max_bytes=1 << 30, read_only=True) as env:
            catalog = Catalog(env, tenant_namespace(env.secret, DEFAULT_TENANT))
            infos = catalog.list(limit=10_000)
            documents = catalog.get_many(info.document_id for info in infos)
            entries = {}
            with env.read() as txn:
                for _, value in txn.scan(Database.ENTRIES):
                    header = decode_header(value)
                    payload = bytes(value[len(value) - header.payload_bytes :])
                    entries[header.identity().token_ids] = payload
        return documents, entries

    return read
