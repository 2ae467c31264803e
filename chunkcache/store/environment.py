"""The LMDB environment: opening, growing, transactions. Knows bytes, not what they mean.

One environment is open per process and directory; other processes may use the same directory at
the same time. The map starts small and is doubled when it is full, once every transaction of this
process has ended; a process whose map another one outgrew takes over the new size likewise.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import lmdb

from chunkcache.errors import (
    InvalidValueError,
    StoreError,
    StoreFormatError,
    StoreFullError,
    StoreLockedError,
    StoreReadOnlyError,
)
from chunkcache.store.lmdb_errors import MapFullError, store_error
from chunkcache.store.manifest import (
    MANIFEST_KEY,
    Manifest,
    create_secret,
    read_secret,
    secret_digest,
    write_secret,
)
from chunkcache.store.map_gate import MapGate
from chunkcache.store.preflight import (
    MAX_READERS,
    check_directory,
    check_not_truncated,
    network_filesystem,
    pad_data_file,
    reserve_lock_file,
)
from chunkcache.store.records import decode_record, encode_record
from chunkcache.store.transaction import Database, Transaction

MIN_BYTES = 1 << 20
INITIAL_MAP_BYTES = 64 << 20
FREEING_STEP_BYTES = 16 << 20
FREEING_ROOM_BYTES = 128 << 20
"""How far removals may take the map beyond ``max_bytes``; they need it where a reader that stays
open keeps freed pages from use."""
REPLACE_TIMEOUT_S = 60.0
LMDB_MAJOR = 0
"""Stores use the 0.9 data format, which every LMDB can read."""

ResultT = TypeVar("ResultT")

_open_directories: set[tuple[int, int]] = set()
_open_lock = threading.Lock()


class StoreEnvironment:
    """An open store. Use :meth:`open`; a context manager.

    Attributes:
        path: Its directory, symlinks resolved.
        max_bytes: Largest size that this process lets the data file reach.
        read_only: Whether writing is refused.
        network_filesystem: Type of the network filesystem that it is on, if it is on one: a reason
            to warn, because other hosts must not use it at the same time.
        manifest: What the store says about itself.
        secret: The tenant secret, 32 bytes.
    """

    manifest: Manifest
    secret: bytes

    def __init__(self, path: Path, *, max_bytes: int, read_only: bool) -> None:
        self.path = path
        self.max_bytes = max_bytes - max_bytes % os.sysconf("SC_PAGE_SIZE")
        self.read_only = read_only
        self.network_filesystem = network_filesystem(path)
        self._pid = os.getpid()
        self._gate = MapGate(REPLACE_TIMEOUT_S)
        self._call_lock = threading.Lock()
        self._databases: dict[Database, Any] = {}
        self._env: lmdb.Environment | None = None
        self._freeing_limit_bytes = 0
        stats = path.stat()
        self._directory_id = (stats.st_dev, stats.st_ino)
        self._is_registered = False

    @classmethod
    def open(cls, path: Path, *, max_bytes: int, read_only: bool = False) -> Self:
        """Open a store, and make one where there is none yet.

        Args:
            path: Its directory; made if missing (unless ``read_only``).
            max_bytes: Bound on the data file, in whole pages. A store that is larger already
                opens, and takes nothing until enough was removed.
            read_only: Refuse every write.

        Raises:
            InvalidValueError: ``max_bytes`` is less than 1 MiB.
            StoreLockedError: This process has it open already, under this or another name.
            StoreFormatError: It has another format, is truncated or lacks its secret.
            StoreFullError: The disk has no room for even an empty store.
            StoreError: The directory cannot be used.
        """
        if max_bytes < MIN_BYTES:
            raise InvalidValueError(f"a store of {max_bytes} bytes; it needs at least {MIN_BYTES}")
        resolved = check_directory(path, read_only=read_only)
        environment = cls(resolved, max_bytes=max_bytes, read_only=read_only)
        environment._register()
        try:
            environment._open_files()
        except BaseException as error:
            environment.close()
            if isinstance(error, lmdb.Error | OSError):
                raise store_error(error, resolved) from error
            raise
        return environment

    def _register(self) -> None:
        with _open_lock:
            if self._directory_id in _open_directories:
                raise StoreLockedError(
                    f"{self.path} is open already in this process; share the one environment"
                )
            _open_directories.add(self._directory_id)
            self._is_registered = True

    def _open_files(self) -> None:
        data = self.path / "data.mdb"
        if not self.read_only:
            reserve_lock_file(self.path)
        file_bytes = data.stat().st_size if data.exists() else 0
        self._env = lmdb.open(
            os.fspath(self.path),
            map_size=max(INITIAL_MAP_BYTES, file_bytes),
            readonly=self.read_only,
            create=not self.read_only,
            readahead=False,
            max_dbs=len(Database),
            max_readers=MAX_READERS,
            lib_version=LMDB_MAJOR,
            mode=0o600,
        )
        check_not_truncated(self._env, self.path, read_only=self.read_only)
        self._env.reader_check()
        if self._env.stat()["entries"] == 0 and not self.read_only:
            self._create()
        self._attach()
        self._freeing_limit_bytes = max(self.max_bytes, self.map_bytes) + FREEING_ROOM_BYTES

    def _create(self) -> None:
        """Write the manifest; in one transaction, so that a half-made store never exists."""
        env = self._lmdb()
        secret = create_secret(self.path)
        with env.begin(write=True) as txn:
            databases = {d: env.open_db(d.value.encode(), txn=txn) for d in Database}
            manifest = Manifest(
                lmdb_version=".".join(map(str, env.lib_version())),
                created_at=time.time(),
                secret_digest=secret_digest(secret),
            )
            # Another process may have made the store meanwhile.
            txn.put(
                MANIFEST_KEY,
                encode_record(manifest),
                overwrite=False,
                db=databases[Database.MANIFEST],
            )

    def _attach(self) -> None:
        """Open the databases of an existing store and check its manifest."""
        env = self._lmdb()
        try:
            for database in Database:
                # The manifest comes first: in what has none, nothing is made.
                may_create = database is not Database.MANIFEST and not self.read_only
                self._databases[database] = env.open_db(database.value.encode(), create=may_create)
        except lmdb.NotFoundError as error:
            raise StoreFormatError(f"{self.path} holds no chunkcache store") from error
        with env.begin() as txn:
            data = txn.get(MANIFEST_KEY, db=self._databases[Database.MANIFEST])
        if data is None:
            raise StoreFormatError(f"{self.path} has no manifest")
        self.manifest = decode_record(data, Manifest, f"the manifest of {self.path}")
        self.secret = read_secret(self.path)
        if secret_digest(self.secret) != self.manifest.secret_digest:
            raise StoreFormatError(f"the secret in {self.path} belongs to another store")

    def close(self) -> None:
        """Wait for open transactions, then close. Further calls do nothing.

        Raises:
            StoreError: A transaction stayed open; the environment stays open too.
        """
        if self._pid != os.getpid():
            return
        with self._gate.replacing():
            env, self._env = self._env, None
            if env is not None:
                env.close()
        with _open_lock:
            if self._is_registered:
                _open_directories.remove(self._directory_id)
                self._is_registered = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def map_bytes(self) -> int:
        """Present size of this process's map."""
        return self._lmdb().info()["map_size"]

    @property
    def file_bytes(self) -> int:
        """Size of the data file, free pages included. It never shrinks."""
        return (self.path / "data.mdb").stat().st_size

    @property
    def used_file_bytes(self) -> int:
        """Bytes up to the end of the last page in use."""
        env = self._lmdb()
        return (env.info()["last_pgno"] + 1) * env.stat()["psize"]

    def compact_to(self, target: Path) -> None:
        """Write a copy without free pages, as of now, into a new directory; others may write on.

        Args:
            target: Made by this call; afterwards a store of its own, with the same secret.

        Raises:
            StoreError: It exists already, or cannot be written.
            StoreFullError: The disk has no room for it.
        """
        receipt = self._gate.enter()
        try:
            target.mkdir(mode=0o700, parents=True)
            self._lmdb().copy(os.fspath(target), compact=True)
            write_secret(target, self.secret)
        except (lmdb.Error, OSError) as error:
            raise store_error(error, target) from error
        finally:
            self._gate.leave(receipt)

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A consistent view of everything. Keep it short: it holds back reuse of freed pages.

        Every buffer it gives is valid inside the ``with`` block alone.

        Raises:
            StoreError: The environment is closed, or was opened by the parent of this process.
        """
        with self._transaction(write=False) as txn:
            yield txn

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """One attempt at a transaction that is kept whole if the block ends, else not at all.

        The map does not grow during it: prefer :meth:`update`.

        Raises:
            StoreFullError: The map as it is, or the disk, has no room.
            StoreReadOnlyError: It was opened for reading alone.
            StoreError: Closed, or opened by the parent of this process.
        """
        if self.read_only:
            raise StoreReadOnlyError("the store is open for reading alone")
        with self._transaction(write=True) as txn:
            yield txn

    def update(self, body: Callable[[Transaction], ResultT], *, frees: bool = False) -> ResultT:
        """Run ``body`` in a write transaction, growing the map as needed.

        Args:
            body: Runs again from the start after each growth, so it must not consume an iterator
                or change anything but the transaction.
            frees: The body removes more than it adds, and must succeed in a full store too: LMDB
                needs new pages even to remove something. It may use what others must leave free.

        Returns:
            What ``body`` returned, once it is on disk.

        Raises:
            StoreFullError: ``max_bytes`` or the disk is full; nothing was kept.
            StoreError: As for :meth:`write`.
        """
        while True:
            seen_bytes = self.map_bytes
            try:
                with self.write() as txn:
                    bytes_before = txn.live_bytes()
                    result = body(txn)
                    bytes_after = txn.live_bytes()
                    if not frees and bytes_after > max(bytes_before, self._usable_bytes):
                        raise self._full()
                    return result
            except MapFullError:
                self._grow(seen_bytes, frees=frees)

    @contextmanager
    def _transaction(self, *, write: bool) -> Iterator[Transaction]:
        raw, receipt = self._begin(write=write)
        try:
            try:
                yield Transaction(raw, self._databases, self._call_lock, is_read_only=not write)
            except BaseException:
                with self._call_lock:
                    raw.abort()
                raise
            if write:
                raw.commit()
                # Committed is committed: a file that stays short is mended when it is next opened.
                with suppress(lmdb.MapResizedError, OSError):
                    pad_data_file(self._lmdb(), self.path)
            else:
                with self._call_lock:
                    raw.abort()
        except lmdb.Error as error:
            raise store_error(error, self.path) from error
        finally:
            self._gate.leave(receipt)

    def _begin(self, *, write: bool) -> "tuple[lmdb.Transaction[memoryview], int]":
        has_cleared_readers = False
        while True:
            receipt = self._gate.enter()
            try:
                if write:
                    return self._lmdb().begin(write=True, buffers=True), receipt
                with self._call_lock:
                    return self._lmdb().begin(buffers=True), receipt
            except lmdb.MapResizedError:
                self._gate.leave(receipt)
            except lmdb.ReadersFullError as error:
                if has_cleared_readers or not self._lmdb().reader_check():
                    self._gate.leave(receipt)
                    raise StoreError("every reader slot of the store is in use") from error
                has_cleared_readers = True
                self._gate.leave(receipt)
                continue
            except lmdb.Error as error:
                self._gate.leave(receipt)
                raise store_error(error, self.path) from error
            except BaseException:
                self._gate.leave(receipt)
                raise
            with self._gate.replacing():
                self._lmdb().set_mapsize(0)

    def _grow(self, seen_bytes: int, *, frees: bool) -> None:
        """Enlarge the map, unless another thread has done so since ``seen_bytes`` was read."""
        with self._gate.replacing():
            map_bytes = self.map_bytes
            if map_bytes > seen_bytes:
                return
            wanted_bytes = min(2 * map_bytes, self.max_bytes)
            if frees and wanted_bytes <= map_bytes < self._freeing_limit_bytes:
                wanted_bytes = map_bytes + FREEING_STEP_BYTES
            if wanted_bytes <= map_bytes:
                raise self._full()
            try:
                self._lmdb().set_mapsize(wanted_bytes)
            except lmdb.Error as error:
                raise store_error(error, self.path) from error

    @property
    def _usable_bytes(self) -> int:
        """What live data may occupy; the rest is for removing data from a full store."""
        return self.max_bytes - min(self.max_bytes // 16, FREEING_STEP_BYTES)

    def _full(self) -> StoreFullError:
        return StoreFullError(
            f"the store has reached its limit of {self.max_bytes} bytes; nothing of this write was "
            "kept"
        )

    def _lmdb(self) -> lmdb.Environment:
        if self._pid != os.getpid():
            raise StoreError("the store was opened before a fork; open it in the child process")
        if self._env is None:
            raise StoreError("the store is closed")
        return self._env
