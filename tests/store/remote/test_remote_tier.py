"""The remote tier over each real backend, and over one that fails, waits and lies."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from chunkcache.entry import Entry
from chunkcache.errors import InvalidValueError
from chunkcache.store.entry_format import encode_entry
from chunkcache.store.remote.address import RemoteAddress, mask_url
from chunkcache.store.remote.backend import Backend, DeclinedError, FailureKind, RemoteFailure
from chunkcache.store.remote.breaker import CircuitBreaker
from chunkcache.store.remote.calls import RemoteCalls
from chunkcache.store.remote.opening import open_backend
from chunkcache.store.remote.tier import RemoteTier, object_key, object_name
from chunkcache.store.tier import MissReason
from chunkcache.testing import TierConformance, conformance_entry

MAX_OBJECT_BYTES = 1 << 24


def make_tier(backend: Backend, timeout_s: float = 20.0, **options: Any) -> RemoteTier:
    reads, writes = (RemoteCalls(backend, timeout_s, CircuitBreaker()) for _ in range(2))
    return RemoteTier(reads, writes, options.pop("max_object_bytes", MAX_OBJECT_BYTES), **options)


def real_backend(url: str, timeout_s: float = 10.0) -> Backend:
    return open_backend(RemoteAddress.parse(url), timeout_s)


class TestRemoteTier(TierConformance):
    """The contract, on a directory, a Redis and an S3 API."""

    @pytest.fixture
    def tier(self, remote_url: str) -> Iterator[RemoteTier]:
        backend = real_backend(remote_url)
        yield make_tier(backend)
        backend.close()


def test_a_backend_reads_nothing_that_is_not_accepted(remote_url: str) -> None:
    backend = real_backend(remote_url)
    backend.put("a/b", b"x" * 1_000)
    seen: list[int] = []

    def refuses(num_bytes: int) -> bool:
        seen.append(num_bytes)
        return False

    with pytest.raises(DeclinedError):
        backend.get("a/b", refuses)
    assert seen == [1_000]
    assert backend.get("a/b", lambda num_bytes: True) == b"x" * 1_000
    assert backend.get("a/c", refuses) is None
    assert (backend.size("a/b"), backend.size("a/c")) == (1_000, None)
    assert list(backend.names()) == [("a/b", 1_000)]
    assert (backend.delete("a/b"), backend.delete("a/b")) == (True, False)
    assert list(backend.names()) == []
    backend.close()


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], set[MissReason]]] = {
    "cut short": (lambda data: data[:-7], {MissReason.TRUNCATED}),
    "cut to its beginning": (lambda data: data[:10], {MissReason.TRUNCATED}),
    "a bit of the header": (
        lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
        {MissReason.CORRUPT_HEADER},
    ),
    "a bit of the payload": (
        lambda data: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:],
        {MissReason.CHECKSUM},
    ),
    "something else": (lambda data: b"<html>not found</html>" * 9, {MissReason.CORRUPT_HEADER}),
    "another tenant's": (
        lambda data: bytes(encode_entry(conformance_entry(1, tenant=b"o"))),
        {MissReason.FOREIGN_NAMESPACE},
    ),
    "another model's": (
        lambda data: bytes(encode_entry(conformance_entry(1, model=b"o"))),
        {MissReason.FOREIGN_MODEL},
    ),
    "another text's": (
        lambda data: bytes(encode_entry(conformance_entry(2))),
        {MissReason.TOKEN_IDS_MISMATCH},
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_whatever_is_damaged_or_foreign_is_met_once(remote_url: str, damage: str) -> None:
    backend = real_backend(remote_url)
    tier, entry = make_tier(backend), conformance_entry(1)
    change, reasons = DAMAGES[damage]
    assert tier.put(entry)
    backend.put(object_name(entry.key), change(bytes(encode_entry(entry))))
    assert {reason for _, reason in tier.check_integrity()} - {
        MissReason.TOKEN_IDS_MISMATCH
    } <= reasons
    assert tier.check_integrity()
    assert tier.get(entry.identity) in reasons
    assert tier.get(entry.identity) is MissReason.ABSENT
    assert tier.put(entry)
    assert isinstance(tier.get(entry.identity), Entry)
    backend.close()


def test_an_object_that_is_too_large_is_not_read(backend) -> None:
    entry = conformance_entry(1)
    backend.objects[object_name(entry.key)] = bytes(2_000)
    tier = make_tier(backend, max_object_bytes=1_999)
    assert tier.get(entry.identity) is MissReason.TOO_LARGE
    assert backend.objects, "somebody else's limit may be higher"
    assert not tier.put(conformance_entry(2, num_tokens=64))
    assert "put" not in backend.calls


@pytest.mark.parametrize("kind", FailureKind)
def test_a_failure_is_a_miss(backend, kind: FailureKind) -> None:
    backend.failure = kind
    tier = make_tier(backend)
    assert tier.get(conformance_entry(1).identity) is MissReason.REMOTE_UNAVAILABLE
    with pytest.raises(RemoteFailure) as caught:
        tier.put(conformance_entry(1))
    assert caught.value.kind is kind


def test_nobody_waits_longer_than_the_timeout(backend) -> None:
    released = threading.Event()
    backend.hook = lambda call: released.wait(30) and None
    tier = make_tier(backend, timeout_s=0.05)
    try:
        for _ in range(3):
            assert tier.get(conformance_entry(1).identity) is MissReason.REMOTE_UNAVAILABLE
        num_calls = len(backend.calls)
        assert tier.get(conformance_entry(1).identity) is MissReason.REMOTE_UNAVAILABLE
        assert len(backend.calls) == num_calls, "the breaker is open"
    finally:
        released.set()


def test_the_breaker_opens_waits_tries_once_and_closes() -> None:
    now = [100.0]
    breaker = CircuitBreaker(3, clock=lambda: now[0], jitter=lambda: 1.0)
    for _ in range(2):
        assert breaker.may_call()
        breaker.note_failure()
    breaker.note_success()
    pauses = []
    for _ in range(3):
        assert breaker.may_call()
        breaker.note_failure()
    for _ in range(8):
        assert not breaker.may_call()
        pauses.append(breaker.wait_s())
        now[0] += breaker.wait_s()
        assert breaker.may_call()
        assert not breaker.may_call(), "one at a time"
        assert breaker.state == "half_open"
        breaker.note_failure()
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    now[0] += breaker.wait_s()
    assert breaker.may_call()
    breaker.note_success()
    assert (breaker.state, breaker.wait_s(), breaker.num_opened) == ("closed", 0.0, 1)


def test_pauses_are_jittered() -> None:
    waits = []
    for jitter in (0.0, 0.5, 1.0):
        breaker = CircuitBreaker(1, clock=lambda: 0.0, jitter=lambda jitter=jitter: jitter)
        breaker.note_failure()
        waits.append(breaker.wait_s())
    assert waits == [0.5, 0.75, 1.0]


def test_names_come_from_keys_and_nothing_else() -> None:
    key = conformance_entry(1).key
    assert object_name(key) == f"entries-2/{key.hex()[:2]}/{key.hex()}"
    assert object_key(object_name(key)) == key
    assert object_name(conformance_entry(1, tenant=b"o").key) != object_name(key)
    for name in ("", "entries-2/ab/zz", object_name(key) + "0", f"entries-1/ab/{key.hex()}"):
        assert object_key(name) is None
    assert object_key(object_name(key).upper()) is None


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket/prefix",
        "http://host/x",
        "s3://",
        "s3:///x",
        "file://host/x",
        "file:///",
        "s3://id:hunter2@bucket/x",
        "s3://bucket/x?secret=hunter2",
        "redis:///0",
        "redis://user:hunter2@host:6379/zero",
        "redis://user:hunter2@host:port/0",
    ],
)
def test_a_url_that_names_no_remote_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(InvalidValueError, match="setting remote") as caught:
        RemoteAddress.parse(url)
    assert "hunter2" not in caught.value.message


def test_secrets_of_a_url_are_not_shown() -> None:
    url = "rediss://user:hunter2@host:6379/0?password=hunter2"
    address = RemoteAddress.parse(url)
    for shown in (address.shown, repr(address), str(replace(address)), mask_url(url)):
        assert "hunter2" not in shown
        assert "user" not in shown
    assert address.shown == "rediss://***@host:6379/0?***"
    assert mask_url("s3://bucket/x") == "s3://bucket/x"
    assert "hunter2" not in mask_url("hunter2")


def test_without_the_packages_an_error_says_what_to_install() -> None:
    script = """
import sys
sys.modules["obstore"] = sys.modules["redis"] = None
from chunkcache.errors import MissingExtraError
from chunkcache.store.remote.address import RemoteAddress
from chunkcache.store.remote.opening import open_backend
for url in ("s3://bucket/x", "redis://u:hunter2@host/0"):
    try:
        open_backend(RemoteAddress.parse(url), 1.0)
    except MissingExtraError as error:
        assert "pip install 'chunkcache[remote]'" in error.message, error
        assert "hunter2" not in error.message
    else:
        raise AssertionError(url)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
