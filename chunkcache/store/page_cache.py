"""Keeps a bulk job's writes from filling the system's page cache.

A corpus is larger than memory, and its entries are not read again soon: cached, they would push
out what the machine does read, and every page of them would be fresh memory, which costs the
kernel (and a hypervisor below it) more than the copy itself.
"""

import os
import threading
from contextlib import suppress

from chunkcache.store.environment import StoreEnvironment


class WrittenPages:
    """What a store's file has grown by since this object was made.

    Args:
        env: The store.
    """

    def __init__(self, env: StoreEnvironment) -> None:
        self._env = env
        self._lock = threading.Lock()
        self._dropped_bytes = env.used_file_bytes

    def drop(self) -> None:
        """Drop what has been committed since the last call, where the system can do that.

        Pages that somebody has mapped and read stay. Nothing is lost either way.
        """
        if not hasattr(os, "posix_fadvise"):
            return
        with self._lock:
            start, end = self._dropped_bytes, self._env.used_file_bytes
            if end <= start:
                return
            self._dropped_bytes = end
            # A filesystem that does not take advice must not fail the job: the data is on disk.
            with suppress(OSError), (self._env.path / "data.mdb").open("rb") as file:
                os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)
