"""Keeps a process's RAM in step with what any process removes from the store.

Each look-up asks first; that costs one small read. Knows which copies in RAM no chunk's record names
(the disk was full, or is open for reading alone), so that they go with their chunks too.
"""

import threading
from collections.abc import Callable, Iterable

from chunkcache.identity import ChunkId, ChunkKey, TenantNamespace
from chunkcache.store.disk import DiskTier
from chunkcache.store.removals import RemovalRecord

_MAX_UNLINKED = 4_096


class RemovalFollower:
    """Applies the log of removals to RAM.

    Args:
        disk: Where the log is.
        forget: Drops entries from RAM, and keeps computations of them from getting there.
        forget_all: Drops all entries of a tenant likewise; of all tenants, where None is given.
    """

    def __init__(
        self,
        disk: DiskTier,
        forget: Callable[[Iterable[ChunkKey]], None],
        forget_all: Callable[[TenantNamespace | None], None],
    ) -> None:
        self._disk = disk
        self._forget = forget
        self._forget_all = forget_all
        self._lock = threading.Lock()
        self._unlinked_lock = threading.Lock()
        self._unlinked: dict[ChunkId, set[ChunkKey]] = {}
        self._seen = disk.last_removal()

    def follow(self) -> bool:
        """Apply what was removed since the last call; when this returns, RAM has none of it.

        Returns:
            Whether anything was.

        Raises:
            StoreError: The store is closed, or cannot be read.
        """
        with self._lock:
            removals = self._disk.removals_since(self._seen)
            if removals.last == self._seen:
                return False
            if removals.is_complete:
                for record in removals.records:
                    self._apply(record)
            else:
                self._forget_all(None)
            self._seen = removals.last
            return True

    def note_unlinked(self, key: ChunkKey, chunk_ids: Iterable[ChunkId]) -> None:
        """RAM may come to hold an entry that holds a trace of chunks, and that they do not name."""
        dropped: set[ChunkKey] = set()
        with self._unlinked_lock:
            for chunk_id in chunk_ids:
                self._unlinked.setdefault(chunk_id, set()).add(key)
            while len(self._unlinked) > _MAX_UNLINKED:
                dropped |= self._unlinked.pop(next(iter(self._unlinked)))
        self._forget(dropped)

    def note_linked(self, key: ChunkKey, chunk_ids: Iterable[ChunkId]) -> None:
        """The chunks name the entry now."""
        with self._unlinked_lock:
            for chunk_id in chunk_ids:
                keys = self._unlinked.get(chunk_id, set())
                keys.discard(key)
                if not keys:
                    self._unlinked.pop(chunk_id, None)

    def _apply(self, record: RemovalRecord) -> None:
        if record.is_whole:
            namespace = record.namespace
            self._forget_all(None if namespace is None else TenantNamespace(namespace))
            return
        keys = set(map(ChunkKey, record.entry_keys))
        with self._unlinked_lock:
            for chunk_id in record.chunk_ids:
                keys |= self._unlinked.pop(ChunkId(chunk_id), set())
        self._forget(keys)
