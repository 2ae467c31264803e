"""A transaction over the named databases of the store: get, put, delete, scan."""

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


class Transaction:
    """Made by the environment alone; unusable once its ``with`` block has ended.

    Buffers that it returns point into the map: they are valid until the block ends, and in a write
    transaction until its next change.
    """

    def __init__(
        self, raw: "lmdb.Transaction[memoryview]", databases: Mapping[Database, Any]
    ) -> None:
        self._raw = raw
        self._databases = databases

    def get(self, database: Database, key: bytes) -> memoryview | None:
        """The value under ``key``, if there is one."""
        return self._raw.get(key, db=self._databases[database])

    def put(self, database: Database, key: bytes, value: bytes | memoryview) -> None:
        """Set a value, replacing an older one."""
        self._raw.put(key, value, db=self._databases[database])

    def delete(self, database: Database, key: bytes) -> bool:
        """Remove a key; says whether it was there."""
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
        with self._raw.cursor(db=self._databases[database]) as cursor:
            found = cursor.set_range(max(prefix, start)) if prefix or start else cursor.first()
            while found:
                key = bytes(cursor.key())
                if not key.startswith(prefix):
                    return
                yield key, cursor.value()
                found = cursor.next()

    def num_entries(self, database: Database) -> int:
        """Keys in a database."""
        return self._raw.stat(self._databases[database])["entries"]

    def num_bytes(self, database: Database) -> int:
        """Bytes of the pages that a database occupies."""
        stat = self._raw.stat(self._databases[database])
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return pages * stat["psize"]

    def live_bytes(self) -> int:
        """Bytes of the pages that all databases occupy."""
        return sum(self.num_bytes(database) for database in Database)
