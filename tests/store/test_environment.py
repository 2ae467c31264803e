"""The environment within one process: opening, refusing, growing, closing."""

import os
import stat
from pathlib import Path

import lmdb
import pytest

from chunkcache.errors import (
    StoreError,
    StoreFormatError,
    StoreLockedError,
)
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.manifest import MANIFEST_KEY, Manifest
from chunkcache.store.records import encode_record
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


def test_a_store_is_made_once_and_keeps_its_secret(path):
    with open_store(path / "deep") as env:
        first = (env.secret, env.manifest)
        put(env, b"k", b"v")
    assert len(first[0]) == 32
    mode = (path / "deep" / "secret.key").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    with open_store(path / "deep") as env:
        assert (env.secret, env.manifest) == first
        assert get(env, b"k") == b"v"
    with open_store(path / "other") as env:
        assert env.secret != first[0]
    assert sorted(os.listdir(path / "deep")) == ["data.mdb", "lock.mdb", "secret.key"]


def test_a_second_open_in_one_process_is_refused_and_the_first_goes_on(path, tmp_path):
    link = tmp_path / "link"
    with open_store(path) as env:
        link.symlink_to(path)
        for name in (path, link, path / ".." / path.name):
            with pytest.raises(StoreLockedError, match="open already"):
                open_store(name)
        put(env, b"k", b"v")
        assert get(env, b"k") == b"v"
    with open_store(link) as env:
        assert env.path == path.resolve()
        assert get(env, b"k") == b"v"


def test_closing_twice_is_closing_and_a_closed_store_says_so(path):
    env = open_store(path)
    env.close()
    env.close()
    with open_store(path) as second:
        env.close()
        with pytest.raises(StoreLockedError):
            open_store(path)
        put(second, b"k", b"v")
    for use in (lambda: get(env, b"k"), lambda: put(env, b"k", b"v")):
        with pytest.raises(StoreError, match="closed"):
            use()


@pytest.mark.parametrize("version", [0, 2, "1", None, True, 1.5])
def test_another_store_format_is_refused(path, version):
    open_store(path).close()
    manifest = Manifest(format=version, lmdb_version="", created_at=0.0, secret_digest=b"")
    with lmdb.open(os.fspath(path), max_dbs=1) as raw, raw.begin(write=True) as txn:
        txn.put(MANIFEST_KEY, encode_record(manifest), db=raw.open_db(b"manifest", txn=txn))
    with pytest.raises(StoreFormatError, match="format"):
        open_store(path)


def test_a_store_without_a_sound_manifest_is_refused(path):
    open_store(path).close()
    for change in (
        lambda txn, db: txn.put(MANIFEST_KEY, b"rubbish that is no record", db=db),
        lambda txn, db: txn.delete(MANIFEST_KEY, db=db),
    ):
        with lmdb.open(os.fspath(path), max_dbs=1) as raw, raw.begin(write=True) as txn:
            change(txn, raw.open_db(b"manifest", txn=txn))
        with pytest.raises(StoreFormatError, match="manifest"):
            open_store(path)


def test_somebody_elses_lmdb_directory_is_refused_and_left_alone(path):
    path.mkdir()
    with lmdb.open(os.fspath(path)) as raw, raw.begin(write=True) as txn:
        txn.put(b"theirs", b"1")
    with pytest.raises(StoreFormatError):
        open_store(path)
    with lmdb.open(os.fspath(path)) as raw, raw.begin() as txn:
        assert list(txn.cursor()) == [(b"theirs", b"1")]


@pytest.mark.parametrize("content", [None, b"", b"short", b"x" * 33, b"y" * 32])
def test_a_lost_or_swapped_secret_is_noticed(path, content):
    open_store(path).close()
    secret = path / "secret.key"
    secret.unlink()
    if content is not None:
        secret.write_bytes(content)
        secret.chmod(0o600)
    with pytest.raises(StoreFormatError, match="secret"):
        open_store(path)


def test_a_secret_that_everybody_can_read_is_refused(path):
    open_store(path).close()
    (path / "secret.key").chmod(0o644)
    with pytest.raises(StoreError, match="chmod 600"):
        open_store(path)


def test_a_path_that_cannot_hold_a_store_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (file, file / "below", loop, Path("/proc/store")):
        with pytest.raises(StoreError):
            open_store(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_refused(path):
    path.mkdir(mode=0o500)
    with pytest.raises(StoreError, match="not writable"):
        open_store(path)


def test_read_only_reads_and_makes_nothing(path):
    with pytest.raises(StoreError):
        open_store(path, read_only=True)
    assert not path.exists()
    path.mkdir()
    with pytest.raises(StoreError, match="no store"):
        open_store(path, read_only=True)
    with open_store(path) as env:
        put(env, b"k", b"v")
        secret = env.secret
    with open_store(path, read_only=True) as env:
        assert get(env, b"k") == b"v"
        assert env.secret == secret
        with pytest.raises(StoreError, match="open for reading alone"):
            put(env, b"k", b"w")
