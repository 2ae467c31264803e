"""What the remote tier's tests share: a real Redis, a real S3 API, a directory, and a backend of ours."""

import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from chunkcache.store.remote.address import RemoteAddress
from chunkcache.store.remote.backend import Backend, DeclinedError, FailureKind, RemoteFailure
from chunkcache.store.remote.opening import open_backend

REDIS_SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
S3_SERVER = shutil.which(
    "moto_server", path=f"{Path(__file__).parents[3] / '.venv-s3' / 'bin'}:{os.environ['PATH']}"
)
BUCKET = "entries"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_port(port: int, process: subprocess.Popen, within_s: float = 60.0) -> None:
    """Return once something listens there."""
    waits = threading.Event()
    for _ in range(int(within_s / 0.05)):
        assert process.poll() is None, "the server has ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        waits.wait(0.05)
    raise AssertionError("the server does not listen")


class RedisServer:
    """A server on loopback that keeps nothing on disk."""

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        self.options = options
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        assert REDIS_SERVER is not None
        command = [REDIS_SERVER, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_for_port(self.port, self.process)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    if REDIS_SERVER is None:
        pytest.skip("no Redis: neither redis-server nor valkey-server is on the path")
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    if S3_SERVER is None:
        pytest.skip("no S3 API: there is no moto_server; make test installs it")
    port = free_port()
    command = [S3_SERVER, "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def s3_url(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty bucket."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3_endpoint,
    }.items():
        monkeypatch.setenv(name, value)
    httpx.post(f"{s3_endpoint}/moto-api/reset").raise_for_status()
    httpx.put(f"{s3_endpoint}/{BUCKET}").raise_for_status()
    return f"s3://{BUCKET}/some/prefix"


@pytest.fixture(params=["file", "redis", "s3"])
def remote_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A remote of each kind, empty."""
    if request.param == "file":
        return (tmp_path / "remote").as_uri()
    if request.param == "s3":
        return request.getfixturevalue("s3_url")
    return request.getfixturevalue("redis_server").url


def backend_of(url: str, timeout_s: float = 10.0) -> Backend:
    return open_backend(RemoteAddress.parse(url), timeout_s)


class ScriptedBackend:
    """Objects in a dictionary, that fail, wait or lie as a test says."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.failure: FailureKind | None = None
        self.hook: Callable[[str], None] = lambda call: None
        self.calls: list[str] = []

    def get(self, name: str, accepts: Callable[[int], bool]) -> bytes | None:
        self._begin("get")
        data = self.objects.get(name)
        if data is not None and not accepts(len(data)):
            raise DeclinedError
        return data

    def size(self, name: str) -> int | None:
        self._begin("size")
        data = self.objects.get(name)
        return None if data is None else len(data)

    def put(self, name: str, data: bytes) -> None:
        self._begin("put")
        self.objects[name] = data

    def delete(self, name: str) -> bool:
        self._begin("delete")
        return self.objects.pop(name, None) is not None

    def names(self) -> Iterator[tuple[str, int]]:
        self._begin("names")
        yield from ((name, len(data)) for name, data in list(self.objects.items()))

    def close(self) -> None:
        pass

    def _begin(self, call: str) -> None:
        self.calls.append(call)
        self.hook(call)
        if self.failure is not None:
            raise RemoteFailure(self.failure)


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()
