"""Growing and filling the map; readers, writers and threads meanwhile."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from chunkcache.errors import (
    InvalidValueError,
    StoreError,
    StoreFullError,
)
from chunkcache.store import environment as environment_module
from chunkcache.store import preflight
from chunkcache.store.environment import INITIAL_MAP_BYTES, StoreEnvironment
from chunkcache.store.map_gate import MapGate
from chunkcache.store.transaction import Database

MAX_BYTES = 1 << 30
ENTRIES = Database.ENTRIES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def open_store(path, *, max_bytes=MAX_BYTES, read_only=False):
    return StoreEnvironment.open(path, max_bytes=max_bytes, read_only=read_only)


def put(env, key, value):
    env.update(lambda txn: txn.put(ENTRIES, key, value))


def get(env, key):
    """A value, or ``None``."""
    with env.read() as txn:
        value = txn.get(ENTRIES, key)
        return value if value is None else bytes(value)


def test_the_map_grows_until_a_batch_fits(path):
    with open_store(path) as env:
        assert env.map_bytes == INITIAL_MAP_BYTES
        values = {b"%04d" % i: bytes([i % 256]) * 1_000_000 for i in range(200)}
        env.update(lambda txn: [txn.put(ENTRIES, k, v) for k, v in values.items()])
        assert env.map_bytes == 4 * INITIAL_MAP_BYTES
        with env.read() as txn:
            assert txn.num_entries(ENTRIES) == 200
            assert all(bytes(value) == values[key] for key, value in txn.scan(ENTRIES))
            assert txn.num_bytes(ENTRIES) >= 200_000_000
        assert env.file_bytes >= 200_000_000
    with open_store(path) as env:
        assert env.map_bytes >= env.file_bytes


def test_over_the_limit_nothing_of_a_batch_is_kept_and_the_store_goes_on(path):
    with open_store(path, max_bytes=100_000_000) as env:
        put(env, b"before", b"v")

        def body(txn):
            for i in range(200):
                txn.put(ENTRIES, b"%d" % i, bytes(1_000_000))

        with pytest.raises(StoreFullError, match="limit"):
            env.update(body)
        with env.read() as txn:
            assert [key for key, _ in txn.scan(ENTRIES)] == [b"before"]
        put(env, b"after", bytes(1_000_000))
        assert get(env, b"after") == bytes(1_000_000)
        assert env.map_bytes <= 100_000_000


def test_a_store_over_its_limit_takes_nothing_until_it_was_emptied(path):
    with open_store(path) as env:
        for i in range(100):
            put(env, b"%d" % i, bytes(1_000_000))
    with open_store(path, max_bytes=32 << 20) as env:
        with pytest.raises(StoreFullError):
            put(env, b"new", bytes(10_000))
        for i in range(80):
            env.update(lambda txn, i=i: txn.delete(ENTRIES, b"%d" % i), frees=True)
        put(env, b"new", bytes(1_000_000))
        assert get(env, b"99") == bytes(1_000_000)


def fill(env, name, num_bytes):
    """Put values until the store is full; returns their keys."""
    for i in range(100_000):
        try:
            put(env, name + b"%d" % i, bytes(num_bytes + i))
        except StoreFullError:
            return [name + b"%d" % j for j in range(i)]
    raise AssertionError("the store never got full")


def test_a_full_store_can_be_emptied_again_and_again(path):
    with open_store(path, max_bytes=80_000_000) as env:
        num_stored = []
        for _ in range(3):
            stored = [*fill(env, b"large", 3_000_000), *fill(env, b"small", 50_000)]
            num_stored.append(len(stored))
            for key in stored:
                assert env.update(lambda txn, key=key: txn.delete(ENTRIES, key), frees=True)
        assert min(num_stored) > 20
        assert env.file_bytes <= 80_000_000


def test_space_is_used_again(path):
    with open_store(path, max_bytes=150_000_000) as env:
        for _ in range(10):
            for i in range(50):
                put(env, b"%d" % i, bytes(2_000_000))
            env.update(lambda txn: [txn.delete(ENTRIES, b"%d" % i) for i in range(50)])
        assert env.file_bytes <= 150_000_000
        with env.read() as txn:
            assert txn.num_bytes(ENTRIES) == 0


def test_a_failed_block_changes_nothing(env):
    def fail(txn):
        txn.put(ENTRIES, b"k", b"v")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        env.update(fail)
    assert get(env, b"k") is None
    with env.write() as txn:
        txn.put(ENTRIES, b"k", b"v")
    assert get(env, b"k") == b"v"


def test_one_attempt_does_not_grow_the_map(env):
    with pytest.raises(StoreFullError), env.write() as txn:
        txn.put(ENTRIES, b"0", bytes(100_000_000))
    assert env.map_bytes == INITIAL_MAP_BYTES
    assert get(env, b"0") is None


def test_transactions_do_not_nest(env):
    with env.read(), pytest.raises(AssertionError), env.read():
        pass
    with env.read(), pytest.raises(AssertionError):
        put(env, b"k", b"v")
    put(env, b"k", b"v")


def test_a_scan_gives_a_prefix_in_order(env):
    keys = [b"a", b"ab", b"abc", b"b", b"ba", b"\xff", b"\xff\xff"]
    env.update(lambda txn: [txn.put(ENTRIES, key, key) for key in reversed(keys)])
    with env.read() as txn:
        assert [k for k, _ in txn.scan(ENTRIES)] == keys
        assert [k for k, _ in txn.scan(ENTRIES, b"ab")] == [b"ab", b"abc"]
        assert [bytes(v) for _, v in txn.scan(ENTRIES, b"a", start=b"aba")] == [b"abc"]
        assert [k for k, _ in txn.scan(ENTRIES, b"b", start=b"a")] == [b"b", b"ba"]
        assert [k for k, _ in txn.scan(ENTRIES, start=b"b")] == keys[3:]
        assert [k for k, _ in txn.scan(ENTRIES, b"\xff")] == [b"\xff", b"\xff\xff"]
        assert list(txn.scan(ENTRIES, b"c")) == []


def test_growth_waits_for_slow_readers_who_see_every_key(path):
    with open_store(path) as env:
        initial = {b"%04d" % i: bytes([i % 256]) * 10_000 for i in range(200)}
        env.update(lambda txn: [txn.put(ENTRIES, k, v) for k, v in initial.items()])
        failures: list[object] = []
        stop = threading.Event()

        def read_slowly():
            while not stop.is_set():
                with env.read() as txn:
                    found = {key: bytes(value) for key, value in txn.scan(ENTRIES, b"0")}
                if found != initial:
                    failures.append(len(found))

        readers = [threading.Thread(target=read_slowly) for _ in range(3)]
        for reader in readers:
            reader.start()
        for i in range(16):
            put(env, b"large%d" % i, bytes(50_000_000))
        stop.set()
        for reader in readers:
            reader.join()
        assert failures == []
        assert env.map_bytes >= 800_000_000


def test_threads_that_all_fill_the_map_all_succeed(path):
    with open_store(path) as env:
        failures: list[BaseException] = []

        def write(thread):
            try:
                for i in range(20):
                    put(env, b"%d-%d" % (thread, i), bytes([thread]) * 3_000_000)
            except BaseException as error:
                failures.append(error)

        writers = [threading.Thread(target=write, args=(i,)) for i in range(4)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert failures == []
        for thread in range(4):
            for i in range(20):
                assert get(env, b"%d-%d" % (thread, i)) == bytes([thread]) * 3_000_000


def test_growth_gives_up_on_a_reader_that_never_leaves(path, monkeypatch):
    monkeypatch.setattr(environment_module, "REPLACE_TIMEOUT_S", 0.05)
    with open_store(path) as env:
        entered, leave = threading.Event(), threading.Event()

        def stay():
            with env.read():
                entered.set()
                leave.wait(30)

        reader = threading.Thread(target=stay)
        reader.start()
        entered.wait(30)
        with pytest.raises(StoreError, match="has been open"):
            put(env, b"k", bytes(100_000_000))
        with pytest.raises(StoreError, match="has been open"):
            env.close()
        put(env, b"small", b"v")
        leave.set()
        reader.join()
        put(env, b"k", bytes(100_000_000))
        assert get(env, b"small") == b"v"


def test_the_gate_lets_a_replacer_go_before_new_users():
    gate = MapGate(timeout_s=30)
    order: list[str] = []
    receipt = gate.enter()
    waiting = threading.Event()

    def replace():
        waiting.set()
        with gate.replacing():
            order.append("replacer")

    def use():
        gate.leave(gate.enter())
        order.append("user")

    replacer = threading.Thread(target=replace)
    replacer.start()
    waiting.wait(30)
    while not gate.is_replacing:
        pass
    user = threading.Thread(target=use)
    user.start()
    assert order == []
    gate.leave(receipt)
    replacer.join()
    user.join()
    assert order == ["replacer", "user"]
    assert gate.num_users == 0


def test_more_readers_than_slots_is_an_error_and_not_for_ever(path, monkeypatch):
    monkeypatch.setattr(environment_module, "MAX_READERS", 3)
    monkeypatch.setattr(preflight, "LOCK_FILE_BYTES", 320)
    with open_store(path) as env:
        put(env, b"k", b"v")
        leave, entered = threading.Event(), threading.Semaphore(0)

        def stay():
            with env.read():
                entered.release()
                leave.wait(30)

        readers = [threading.Thread(target=stay) for _ in range(3)]
        for reader in readers:
            reader.start()
        for _ in readers:
            entered.acquire()
        with pytest.raises(StoreError, match="reader slot"):
            get(env, b"k")
        leave.set()
        for reader in readers:
            reader.join()
        assert get(env, b"k") == b"v"


def test_a_compact_copy_holds_the_same_in_less_room(path, tmp_path):
    with open_store(path) as env:
        for i in range(40):
            put(env, b"%d" % i, bytes([i]) * 500_000)
        env.update(lambda txn: [txn.delete(ENTRIES, b"%d" % i) for i in range(1, 40)], frees=True)
        env.compact_to(tmp_path / "copy")
        assert env.file_bytes > 20_000_000
        with pytest.raises(StoreError):
            env.compact_to(tmp_path / "copy")
        with open_store(tmp_path / "copy") as copy:
            assert get(copy, b"0") == bytes(500_000)
            assert copy.secret == env.secret
            assert copy.file_bytes < 1_000_000
            put(copy, b"more", b"v")


def test_a_store_of_no_size_is_refused(path):
    with pytest.raises(InvalidValueError):
        open_store(path, max_bytes=1_000)


@pytest.mark.parametrize(
    ("mounts", "found"),
    [
        ([("/", "ext4"), ("/data", "nfs4")], "nfs4"),
        ([("/", "nfs"), ("/data", "ext4")], None),
        ([("/", "ext4"), ("/data", "nfs4"), ("/data", "xfs")], None),
        ([("/", "overlay"), ("/database", "nfs")], None),
    ],
)
def test_a_network_filesystem_is_named(monkeypatch, mounts, found):
    partitions = [SimpleNamespace(mountpoint=mount, fstype=kind) for mount, kind in mounts]
    monkeypatch.setattr(preflight.psutil, "disk_partitions", lambda all: partitions)
    assert preflight.network_filesystem(Path("/data/store")) == found
