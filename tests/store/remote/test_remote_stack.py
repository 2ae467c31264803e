"""The stack over a remote: same bits, nothing lost when it is dead, deletes that arrive."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from chunkcache.catalog import Catalog
from chunkcache.identity import EntryIdentity
from chunkcache.store.disk import DiskTier
from chunkcache.store.entry_format import encode_entry
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.host import HostTier
from chunkcache.store.lease import Lease
from chunkcache.store.load_speed import Calibration, LoadSpeed
from chunkcache.store.remote import outbox
from chunkcache.store.remote.backend import Backend, FailureKind
from chunkcache.store.remote.opening import open_remote
from chunkcache.store.remote.remote_cache import RemoteCache
from chunkcache.store.remote.tier import object_name
from chunkcache.store.stack import TierStack
from chunkcache.store.tier import MissReason, NotStored
from chunkcache.testing import ScriptedPrefill, conformance_entry

HOST_BYTES = 1 << 20


def owned(txn: object) -> bool:
    return True


class Node:
    """A store with a stack over a remote; the worker's rounds are done by hand."""

    def __init__(
        self,
        path: Path,
        url: str,
        backend: Backend | None = None,
        *,
        speed: LoadSpeed | None = None,
        read_only: bool = False,
        timeout_s: float = 20.0,
    ) -> None:
        self.now = 1_000_000.0
        self.env = StoreEnvironment.open(path, max_bytes=1 << 28, read_only=read_only)
        self.remote: RemoteCache = open_remote(
            self.env, url, timeout_s=timeout_s, max_object_bytes=1 << 24, backend=backend
        )
        self.remote._speed = speed
        self.worker = self.remote._worker
        self.disk = DiskTier(self.env)
        self.stack = TierStack(HostTier(HOST_BYTES), self.disk, speed, self.remote)

    def load_or_prefill(self, prefill: ScriptedPrefill) -> Lease:
        return self.stack.load_or_prefill(prefill.entry.identity, prefill, guard=owned)

    def sync(self) -> None:
        while self.worker.work():
            pass

    def owed(self) -> tuple[int, int]:
        with self.env.read() as txn:
            return outbox.count_owed(txn)

    def close(self) -> None:
        self.stack.check_integrity()
        stats = self.stack.stats()
        assert stats.leases_open == 0
        assert stats.lookups == sum(stats.hits.values()) + sum(stats.misses.values())
        self.worker.close(0.0)
        self.remote.close(0.0)
        self.env.close()


MakeNode = Callable[..., Node]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[MakeNode]:
    nodes: list[Node] = []

    def make(name: str, url: str = "redis://scripted/0", *args: object, **options: object) -> Node:
        nodes.append(Node(tmp_path / name, url, *args, **options))  # type: ignore[arg-type]
        return nodes[-1]

    yield make
    for each in nodes:
        if each.env._env is not None:
            each.close()


def test_another_node_gets_the_same_bits_without_computing(node, remote_url) -> None:
    a, b = node("a", remote_url), node("b", remote_url)
    entries = [conformance_entry(1), conformance_entry(2, codec="int8", num_tokens=70)]
    for entry in entries:
        a.load_or_prefill(ScriptedPrefill(entry)).release()
    a.sync()
    assert a.stack.stats().remote.sent == len(entries)
    assert a.owed() == (0, 0)
    for entry in entries:
        prefill = ScriptedPrefill(entry)
        with b.load_or_prefill(prefill) as lease:
            assert (lease.source, lease.miss, lease.warning) == ("remote", None, None)
            assert bytes(encode_entry(lease.entry)) == bytes(encode_entry(entry))
        assert prefill.num_calls == 0
        b.stack._host.clear()
        with b.load_or_prefill(prefill) as near:
            assert near.source == "disk"
            assert bytes(encode_entry(near.entry)) == bytes(encode_entry(entry))
    stats = b.stack.stats()
    assert stats.hits == {"host": 0, "disk": 2, "remote": 2}
    assert stats.remote.hits == 2
    assert stats.remote.read_bytes == sum(len(encode_entry(e)) for e in entries)
    assert b.owed() == (0, 0), "what came from the remote is not sent back"


def test_a_delete_reaches_the_remote_and_every_other_node(node, remote_url) -> None:
    a, b = node("a", remote_url), node("b", remote_url)
    entry = conformance_entry(1)
    a.load_or_prefill(ScriptedPrefill(entry)).release()
    a.sync()
    assert a.stack.drop([entry.key]) == 1
    a.sync()
    prefill = ScriptedPrefill(entry)
    with b.load_or_prefill(prefill) as lease:
        assert (lease.source, lease.miss) == ("computed", MissReason.ABSENT)
    assert a.stack.stats().remote.removed == 1


def test_a_delete_while_the_remote_is_dead_outlives_a_restart(node, backend) -> None:
    a, entry = node("a", backend=backend), conformance_entry(1)
    a.load_or_prefill(ScriptedPrefill(entry)).release()
    a.sync()
    backend.failure = FailureKind.UNREACHABLE
    a.stack.drop([entry.key])
    for _ in range(5):
        a.sync()
    assert a.owed() == (0, 1)
    a.close()
    a = node("a", backend=backend)
    assert object_name(entry.key) in backend.objects
    backend.failure = None
    calls = len(backend.calls)
    prefill = ScriptedPrefill(entry)
    assert a.stack.load(entry.identity, guard=owned) is MissReason.ABSENT
    assert len(backend.calls) == calls, "what is to be removed is not even asked for"
    a.sync()
    assert object_name(entry.key) not in backend.objects
    assert a.owed() == (0, 1), "on record until no sending from before can arrive any more"
    backend.objects[object_name(entry.key)] = bytes(encode_entry(entry))  # one that did
    a.worker._clock = lambda: 1e12
    a.sync()
    assert (a.owed(), backend.objects) == ((0, 0), {})
    a.load_or_prefill(prefill).release()
    a.sync()
    assert object_name(entry.key) in backend.objects


def test_storing_again_voids_a_removal(node, backend) -> None:
    a, entry = node("a", backend=backend), conformance_entry(1)
    a.load_or_prefill(ScriptedPrefill(entry)).release()
    a.sync()
    a.stack.drop([entry.key])
    a.load_or_prefill(ScriptedPrefill(entry)).release()
    assert a.owed() == (1, 0)
    a.worker._clock = lambda: 1e12
    a.sync()
    assert object_name(entry.key) in backend.objects


def test_an_entry_deleted_while_it_is_fetched_is_not_served(node, backend) -> None:
    a, b = node("a", backend=backend), node("b", backend=backend)
    entry, prefill = conformance_entry(1), ScriptedPrefill(conformance_entry(1))
    a.load_or_prefill(ScriptedPrefill(entry)).release()
    a.sync()

    def delete(call: str) -> None:
        if call == "get":
            b.stack.drop([entry.key])

    backend.hook = delete
    with b.load_or_prefill(prefill) as lease:
        assert (lease.source, lease.warning) == ("computed", NotStored.DROPPED)
    assert not b.stack.contains(entry.key)
    assert b.stack.tier_of(entry.key) is None


def test_a_dead_remote_is_a_miss_and_comes_back(node, backend) -> None:
    a = node("a", backend=backend)
    backend.failure = FailureKind.TIMEOUT
    for seed in range(5):
        with a.load_or_prefill(ScriptedPrefill(conformance_entry(seed))) as lease:
            assert (lease.source, lease.miss) == ("computed", MissReason.REMOTE_UNAVAILABLE)
    stats = a.stack.stats()
    assert stats.remote.state == "open"
    assert stats.remote.misses == {MissReason.REMOTE_UNAVAILABLE: 5}
    assert stats.remote.failures == {FailureKind.TIMEOUT: 3}
    assert a.owed() == (5, 0)
    backend.failure = None
    for breaker in (a.remote._reads.breaker, a.remote._writes.breaker):
        breaker._clock = lambda: 1e9
    a.sync()
    stats = a.stack.stats()
    assert (stats.remote.state, stats.remote.sent, a.owed()) == ("closed", 5, (0, 0))


def test_a_server_that_is_killed_and_starts_again(node, redis_server) -> None:
    server, remote_url = redis_server, redis_server.url
    a, entry = node("a", remote_url, timeout_s=5.0), conformance_entry(1)
    a.load_or_prefill(ScriptedPrefill(entry)).release()
    a.sync()
    server.stop()
    for seed in range(2, 6):
        with a.load_or_prefill(ScriptedPrefill(conformance_entry(seed))) as lease:
            assert (lease.source, lease.warning) == ("computed", None)
    a.sync()
    assert a.owed() == (4, 0)
    server.start()
    for breaker in (a.remote._reads.breaker, a.remote._writes.breaker):
        breaker._clock = lambda: 1e9
    a.sync()
    assert a.owed() == (0, 0)
    b = node("b", remote_url)
    with b.load_or_prefill(ScriptedPrefill(conformance_entry(3))) as lease:
        assert lease.source == "remote"


def test_what_is_slower_than_a_prefill_is_not_fetched(node, backend) -> None:
    speed = LoadSpeed(Calibration(prefill_s_per_row=1e-6, load_s_per_byte=1e-12))
    a, b = node("a", backend=backend), node("b", backend=backend, speed=speed)
    for seed in range(2):
        a.load_or_prefill(ScriptedPrefill(conformance_entry(seed))).release()
    a.sync()
    with b.load_or_prefill(ScriptedPrefill(conformance_entry(0))) as lease:
        assert lease.source == "remote"
    for _ in range(15):
        speed.note_load(1, 1.0, tier="remote")
    with b.load_or_prefill(ScriptedPrefill(conformance_entry(1))) as lease:
        assert (lease.source, lease.miss) == ("computed", MissReason.ABSENT)
    assert b.stack.stats().remote.misses == {MissReason.SLOWER_THAN_PREFILL: 1}
    b.stack.drop([conformance_entry(1).key])
    assert not speed.is_slower(1 << 20, 1, tier="disk"), "the disk's figures are its own"


def test_sixteen_want_one_entry_and_it_is_fetched_once(node, backend) -> None:
    a, b = node("a", backend=backend), node("b", backend=backend)
    entry = conformance_entry(1)
    a.load_or_prefill(ScriptedPrefill(entry)).release()
    a.sync()
    everybody = threading.Barrier(16)
    sources: list[str] = []

    def want() -> None:
        everybody.wait(30)
        with b.load_or_prefill(ScriptedPrefill(entry)) as lease:
            sources.append(lease.source)
            assert torch.equal(lease.entry.k, entry.k)

    threads = [threading.Thread(target=want) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(sources) == ["host"] * 15 + ["remote"]
    assert backend.calls.count("get") == 2, "one of the first node, one of the second"


def test_a_damaged_object_is_replaced(node, backend) -> None:
    a, b = node("a", backend=backend), node("b", backend=backend)
    entry = conformance_entry(1)
    a.load_or_prefill(ScriptedPrefill(entry)).release()
    a.sync()
    name = object_name(entry.key)
    sound = backend.objects[name]
    backend.objects[name] = sound[:-1] + bytes([sound[-1] ^ 1])
    with b.load_or_prefill(ScriptedPrefill(entry)) as lease:
        assert (lease.source, lease.miss) == ("computed", MissReason.CHECKSUM)
    b.sync()
    assert backend.objects[name] == sound
    assert b.stack.stats().remote.misses == {MissReason.CHECKSUM: 1}


def test_credentials_that_may_only_read_serve_hits(node, backend) -> None:
    a, b = node("a", backend=backend), node("b", backend=backend)
    entry = conformance_entry(1)
    a.load_or_prefill(ScriptedPrefill(entry)).release()
    a.sync()

    def deny(call: str) -> None:
        backend.failure = FailureKind.DENIED if call in ("size", "put", "delete") else None

    backend.hook = deny
    for seed in range(2, 9):
        b.load_or_prefill(ScriptedPrefill(conformance_entry(seed))).release()
    for _ in range(8):
        b.sync()
    assert b.remote._writes.breaker.state == "open"
    with b.load_or_prefill(ScriptedPrefill(entry)) as lease:
        assert lease.source == "remote"
    assert b.owed() == (7, 0)


def test_a_loose_text_neither_asks_nor_tells_the_remote(node, backend) -> None:
    a, entry = node("a", backend=backend), conformance_entry(1)
    loose = EntryIdentity(**{**vars_of(entry.identity), "is_loose": True})
    lease = a.stack.load_or_prefill(
        loose, ScriptedPrefill(entry), guard=lambda txn: False, may_lend=True
    )
    assert lease.warning is None
    lease.release()
    a.sync()
    assert (backend.calls, backend.objects) == ([], {})


def vars_of(identity: EntryIdentity) -> dict[str, object]:
    return {name: getattr(identity, name) for name in identity.__dataclass_fields__}


def test_without_a_guard_nothing_from_the_remote_is_kept(node, backend) -> None:
    a, b = node("a", backend=backend), node("b", backend=backend)
    entry = conformance_entry(1)
    a.load_or_prefill(ScriptedPrefill(entry)).release()
    a.sync()
    with b.stack.load(entry.identity) as lease:
        assert lease.source == "remote"
    assert b.stack.tier_of(entry.key) is None


def test_deleting_a_document_removes_its_entries_from_the_remote(
    node, backend, make_entry, make_document
) -> None:
    a = node("a", backend=backend)
    document = make_document("d", "alpha")
    catalog = Catalog(a.env, make_entry().identity.namespace)
    entry = make_entry(token_ids=document.chunks[0].token_ids)
    catalog.put(document, entries=[entry], now=1.0)
    a.sync()
    assert object_name(entry.key) in backend.objects
    catalog.delete("d")
    assert a.owed() == (0, 1)
    a.sync()
    assert backend.objects == {}


def test_a_store_opened_for_reading_fetches_and_changes_nothing(node, backend) -> None:
    a = node("a", backend=backend)
    entries = [conformance_entry(seed) for seed in range(2)]
    a.load_or_prefill(ScriptedPrefill(entries[0])).release()
    a.sync()
    b = node("b", backend=backend)
    b.close()
    objects = dict(backend.objects)
    b = node("b", backend=backend, read_only=True)
    with b.load_or_prefill(ScriptedPrefill(entries[0])) as lease:
        assert (lease.source, lease.warning) == ("remote", NotStored.READ_ONLY)
    with b.load_or_prefill(ScriptedPrefill(entries[1])) as lease:
        assert (lease.source, lease.warning) == ("computed", NotStored.READ_ONLY)
    b.sync()
    assert backend.objects == objects


def test_the_worker_thread_sends_by_itself_and_ends(node, backend) -> None:
    a = node("a", backend=backend)
    sent = threading.Event()
    backend.hook = lambda call: sent.set() if call == "put" else None
    a.remote.start()
    a.load_or_prefill(ScriptedPrefill(conformance_entry(1))).release()
    assert sent.wait(30)
    a.load_or_prefill(ScriptedPrefill(conformance_entry(2))).release()
    a.stack.close()
    assert len(backend.objects) == 2, "closing drains"
    assert not a.worker._thread.is_alive()


def test_closing_does_not_wait_for_a_dead_remote(node, backend) -> None:
    a = node("a", backend=backend)
    backend.failure = FailureKind.UNREACHABLE
    a.remote.start()
    for seed in range(4):
        a.load_or_prefill(ScriptedPrefill(conformance_entry(seed))).release()
    a.stack.close()
    assert not a.worker._thread.is_alive()
    assert a.owed() == (4, 0)


def test_a_store_that_never_had_a_remote_owes_nothing(env, stack, make_entry) -> None:
    entry = make_entry()
    stack.load_or_prefill(entry.identity, ScriptedPrefill(entry)).release()
    stack.drop([entry.key])
    with env.read() as txn:
        assert outbox.count_owed(txn) == (0, 0)
