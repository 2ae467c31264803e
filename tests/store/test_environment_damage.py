"""Truncated, foreign and half-written data files: refused or mended, never fatal."""

import os
from pathlib import Path

import pytest

from chunkcache.errors import (
    StoreFormatError,
)
from chunkcache.store import environment as environment_module
from chunkcache.store.environment import StoreEnvironment
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


@pytest.mark.parametrize("num_bytes", [100, 4_096, 5_000, 8_192, 1_000_000])
def test_a_truncated_file_is_refused_before_it_is_touched(path, num_bytes):
    with open_store(path) as env:
        for i in range(20):
            put(env, b"%d" % i, bytes(100_000))
    os.truncate(path / "data.mdb", num_bytes)
    for read_only in (False, True):
        with pytest.raises(StoreFormatError, match="start empty"):
            open_store(path, read_only=read_only)


def test_a_file_of_rubbish_is_refused(path):
    open_store(path).close()
    (path / "data.mdb").write_bytes(os.urandom(100_000))
    with pytest.raises(StoreFormatError):
        open_store(path)


def take_and_free_pages(env):
    """LMDB counts the last of these pages as part of the file, and never writes them."""
    put(env, b"freed", bytes(200_000))

    def body(txn):
        txn.delete(ENTRIES, b"freed")
        txn.put(ENTRIES, b"never there", bytes(200_000))
        txn.delete(ENTRIES, b"never there")

    env.update(body)


def test_a_sound_file_never_looks_truncated(path):
    with open_store(path) as env:
        take_and_free_pages(env)
        size = env._lmdb().info()["last_pgno"] * 4_096 + 4_096
        assert env.file_bytes == size
    open_store(path, read_only=True).close()


def test_a_file_that_ends_in_pages_never_written_is_mended(path, monkeypatch):
    monkeypatch.setattr(environment_module, "pad_data_file", lambda env, path: None)
    with open_store(path) as env:
        put(env, b"kept", bytes(10_000))
        take_and_free_pages(env)
        size = env._lmdb().info()["last_pgno"] * 4_096 + 4_096
        assert env.file_bytes < size
    with pytest.raises(StoreFormatError, match="Open the store once"):
        open_store(path, read_only=True)
    with open_store(path) as env:
        assert get(env, b"kept") == bytes(10_000)
        assert env.file_bytes == size


@pytest.mark.parametrize("num_pages_cut", [1, 20, 48, 49, 60])
def test_a_file_cut_anywhere_cannot_kill_the_process(path, num_pages_cut):
    with open_store(path) as env:
        for name in (b"first", b"last"):
            # Pages freed here take the tree's pages later, so that the value is last in the file.
            for i in range(8):
                put(env, b"small", b"%d" % i)
            put(env, name, b"x" * 200_000)
    os.truncate(path / "data.mdb", (path / "data.mdb").stat().st_size - num_pages_cut * 4_096)
    if num_pages_cut > 48:
        with pytest.raises(StoreFormatError):
            open_store(path)
        return
    with open_store(path) as env:
        assert get(env, b"first") == b"x" * 200_000
        read = get(env, b"last")
        assert read is not None
        assert (len(read), read[-1]) == (200_000, 0)


def test_a_failed_open_leaves_the_directory_free(path):
    open_store(path).close()
    secret = (path / "secret.key").read_bytes()
    (path / "secret.key").unlink()
    with pytest.raises(StoreFormatError):
        open_store(path)
    (path / "secret.key").write_bytes(secret)
    (path / "secret.key").chmod(0o600)
    open_store(path).close()
