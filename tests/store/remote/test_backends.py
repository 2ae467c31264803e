"""What real servers do when they cannot, or will not: each failure by its name."""

import os
import socket
from collections.abc import Callable, Iterator

import pytest
import redis

from chunkcache.store.remote.address import RemoteAddress
from chunkcache.store.remote.backend import Backend, FailureKind, RemoteFailure
from chunkcache.store.remote.opening import open_backend


@pytest.fixture
def make_backend() -> Iterator[Callable[..., Backend]]:
    backends: list[Backend] = []

    def make(url: str, timeout_s: float = 10.0) -> Backend:
        backends.append(open_backend(RemoteAddress.parse(url), timeout_s))
        return backends[-1]

    yield make
    for each in backends:
        each.close()


def test_a_full_redis_and_wrong_credentials_have_their_names(redis_server, make_backend) -> None:
    client = redis.Redis(port=redis_server.port)
    client.config_set("maxmemory", "1")
    with pytest.raises(RemoteFailure) as full:
        make_backend(redis_server.url).put("a", b"x")
    assert full.value.kind is FailureKind.FULL
    client.config_set("maxmemory", "0")
    client.config_set("requirepass", "right")
    for url in (redis_server.url, redis_server.url.replace("//", "//:wrong@")):
        with pytest.raises(RemoteFailure) as denied:
            make_backend(url).get("a", lambda num_bytes: True)
        assert denied.value.kind is FailureKind.DENIED
    make_backend(redis_server.url.replace("//", "//:right@")).put("a", b"x")
    client.close()


def test_a_bucket_that_is_not_there_and_a_port_that_nobody_listens_on(
    s3_url, make_backend, monkeypatch
) -> None:
    with pytest.raises(RemoteFailure) as missing:
        make_backend("s3://nowhere/x").put("a", b"x")
    assert missing.value.kind is FailureKind.ERROR
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(RemoteFailure) as gone:
        make_backend(s3_url).put("a", b"x")
    assert gone.value.kind is FailureKind.UNREACHABLE


def test_a_server_that_accepts_and_never_answers_is_a_timeout(make_backend) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        with pytest.raises(RemoteFailure) as caught:
            make_backend(url, 0.2).size("a")
        assert caught.value.kind is FailureKind.TIMEOUT


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_denied(tmp_path, make_backend) -> None:
    backend = make_backend((tmp_path / "remote").as_uri())
    (tmp_path / "remote").chmod(0o500)
    with pytest.raises(RemoteFailure) as caught:
        backend.put("a/b", b"x")
    assert caught.value.kind is FailureKind.DENIED
