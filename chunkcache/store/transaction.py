"""A transaction over the named databases of the store: get, put, delete, scan."""

import threading
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

import lmdb


class Database(StrEnum):
    """The named databases."""

    MANIFEST = "manifest"
    DOCUMENTS = "documents"
    CHUNKS = "chunks"
    ENTRIES = "entries"
    QUARANTINE = "quarantine"
    VECTORS = "vectors"
    REMOVALS = "removals"


class Transaction:
    """Made by the environment alone; unusable once its ``with`` block has ended.

    Buffers that it returns point into the map: they are valid until the block ends, and in a write
    transaction until its next change.

    Args:
        raw: LMDB's transaction.
        databases: Handles of the databases.
        call_lock: Held for each call into LMDB. py-lmdb lets an abort wait until no thread is
            inside any call on the environment, so that a few busy readers would hold it up for
            ever; with this lock at most one is inside.
        is_read_only: Whether it refuses changes.

    Attributes:
        is_read_only: As given.
    """

    def __init__(
        self,
        raw: "lmdb.Transaction[memoryview]",
        databases: Mapping[Database, Any],
        call_lock: threading.Lock,
        *,
        is_read_only: bool,
    ) -> None:
        self.is_read_only = is_read_only
        self._raw = raw
        self._databases = databases
        self._call_lock = call_lock

    def get(self, database: Database, key: bytes) -> memoryview | None:
        """The value under ``key``, if there is one."""
        with self._call_lock:
            return self._raw.get(key, db=self._databases[database])

    def put(self, database: Database, key: bytes, value: bytes | memoryview) -> None:
        """Set a value, replacing an older one."""
        with self._call_lock:
            self._raw.put(key, value, db=self._databases[database])

    def delete(self, database: Database, key: bytes) -> bool:
        """Remove a key; says whether it was there."""
        with self._call_lock:
            return self._raw.delete(key, db=self._databases[database])

    def scan(
        self, database: Database, prefix: bytes = b"", *, start: bytes = b""
    ) -> Iterator[tuple[bytes, memoryview]]:
        """Keys with a prefix, in order, with their values.

        Args:
            database: Where to look.
            prefix: What every key begins with.
            start: First key of interest (inclusive).

        Yields:
            A copy of the key, and a buffer. Change nothing in the database meanwhile.
        """
        first = max(prefix, start)
        with self._call_lock:
            cursor = self._raw.cursor(db=self._databases[database])
            found = cursor.set_range(first) if first else cursor.first()
        while True:
            with self._call_lock:
                if not found or not (key := bytes(cursor.key())).startswith(prefix):
                    cursor.close()
                    return
                value = cursor.value()
            yield key, value
            with self._call_lock:
                found = cursor.next()

    def first_key(self, database: Database) -> bytes | None:
        """The first key in order, if there is one."""
        return self._end_key(database, is_last=False)

    def last_key(self, database: Database) -> bytes | None:
        """The last key in order, if there is one."""
        return self._end_key(database, is_last=True)

    def _end_key(self, database: Database, *, is_last: bool) -> bytes | None:
        with self._call_lock:
            cursor = self._raw.cursor(db=self._databases[database])
            found = cursor.last() if is_last else cursor.first()
            key = bytes(cursor.key()) if found else None
            cursor.close()
            return key

    def num_entries(self, database: Database) -> int:
        """Keys in a database."""
        with self._call_lock:
            return self._raw.stat(self._databases[database])["entries"]

    def num_bytes(self, database: Database) -> int:
        """Bytes of the pages that a database occupies."""
        with self._call_lock:
            stat = self._raw.stat(self._databases[database])
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return pages * stat["psize"]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        with self._call_lock:
            return self._raw.stat(self._databases[Database.ENTRIES])["psize"]

    def live_bytes(self) -> int:
        """Bytes of the pages that all databases occupy."""
        return sum(self.num_bytes(database) for database in Database)
