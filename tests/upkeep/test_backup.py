"""Backup: a copy as of one moment while others write, all or nothing, restored by opening it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chunkcache.catalog import Catalog
from chunkcache.errors import StoreError, StoreFullError
from chunkcache.identity import TenantNamespace
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.transaction import Database
from chunkcache.upkeep.backup import backup
from chunkcache.upkeep.verify import verify

NS = TenantNamespace(b"n" * 32)


def contents(env):
    with env.read() as txn:
        return {(d, k): bytes(v) for d in Database for k, v in txn.scan(d)}


def open_copy(path: Path) -> StoreEnvironment:
    return StoreEnvironment.open(path, max_bytes=1 << 30)


def test_a_backup_holds_the_same_and_is_a_store_of_its_own(furnished, tmp_path) -> None:
    target = tmp_path / "copy"
    report = backup(furnished.env, target)
    assert report.is_sound
    assert report.checked.documents == 3
    assert sorted(os.listdir(target)) == ["data.mdb", "secret.key"]
    assert target.stat().st_mode & 0o077 == 0
    with open_copy(target) as copy:
        assert contents(copy) == contents(furnished.env)
        assert copy.secret == furnished.env.secret
        Catalog(copy, NS).delete("first")
    assert furnished.catalog.get("first") is not None


def test_it_never_overwrites(furnished, tmp_path) -> None:
    for name in ("file", "folder", "dangling"):
        target = tmp_path / name
        if name == "file":
            target.write_text("mine")
        elif name == "folder":
            target.mkdir()
        else:
            target.symlink_to(tmp_path / "nowhere")
        with pytest.raises(StoreError, match="there already"):
            backup(furnished.env, target)
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_what_cannot_be_finished_leaves_nothing(furnished, tmp_path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what == "entries":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backup(furnished.env, tmp_path / "copy", on_progress=interrupt)
    assert os.listdir(tmp_path) == ["store"]
    backup(furnished.env, tmp_path / "copy")
    assert sorted(os.listdir(tmp_path)) == ["copy", "store"]


def test_a_disk_without_room_says_so(furnished, tmp_path) -> None:
    furnished.put("large", "w" * 20_000)
    script = f"""
import resource
from pathlib import Path
from chunkcache.errors import StoreFullError
from chunkcache.store.environment import StoreEnvironment
from chunkcache.upkeep.backup import backup
with StoreEnvironment.open(Path({os.fspath(tmp_path / "store")!r}), max_bytes=1 << 30) as env:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        backup(env, Path({os.fspath(tmp_path / "copy")!r}))
    except StoreFullError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "no room" in done.stdout, done.stderr
    assert os.listdir(tmp_path) == ["store"]
    assert issubclass(StoreFullError, StoreError)


WRITER = """
import os, sys
from pathlib import Path
from chunkcache.catalog import Catalog
from chunkcache.documents import Chunk, Document
from chunkcache.identity import chunk_id
from chunkcache.store.environment import StoreEnvironment

namespace = b"n" * 32
with StoreEnvironment.open(Path(sys.argv[1]), max_bytes=1 << 30) as env:
    catalog = Catalog(env, namespace)
    number = 0
    while True:
        ids = (number,) * 400
        chunk = Chunk(chunk_id(namespace, b"t" * 32, ids), 0, 4, ids)
        # Each document replaces the one before: exactly one is there at any moment.
        catalog.put(Document("d", f"{number:04}", {}, (chunk,), b"t" * 32, "one"), now=1.0)
        os.write(1, b".")
        number += 1
"""


def test_a_copy_made_while_another_process_writes_is_of_one_moment(tmp_path) -> None:
    path = tmp_path / "store"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, os.fspath(path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stdout=subprocess.PIPE,
    )
    assert writer.stdout is not None
    try:
        versions = []
        for number in range(6):
            writer.stdout.read(1)
            with open_copy(path) as env:
                report = backup(env, tmp_path / f"copy-{number}")
            assert report.findings == ()
            with open_copy(tmp_path / f"copy-{number}") as copy:
                document = Catalog(copy, NS).require("d")
                assert verify(copy).findings == ()
            assert document.chunks[0].token_ids == (int(document.text),) * 400
            versions.append(document.version)
        assert versions == sorted(versions)
    finally:
        writer.kill()
        writer.communicate()
