"""Content digests of files, remembered by what the file system says about them.

A model's name says nothing about its weights; their bytes do. Hashing half a gigabyte takes a
fraction of a second, hashing tens of gigabytes does not, so digests are remembered by path, size,
the times of its last change and inode. The memory is a convenience: losing it costs a hash. A file
that changed a moment before it was hashed is not remembered: file systems count time in steps, and
another change in the same step would not show.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from blake3 import blake3

from chunkcache.identity import DIGEST_BYTES, digest_fields

_SETTLED_NS: Final = 2_000_000_000
"""No file system in use counts time in longer steps (FAT: two seconds)."""


class FileDigests:
    """BLAKE3 digests of files, remembered in one JSON file.

    Args:
        memory_path: Where to remember; None remembers nothing.
        now_ns: The time, in nanoseconds since the epoch.
    """

    def __init__(self, memory_path: Path | None, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._memory_path = memory_path
        self._now_ns = now_ns

    def digest(self, path: Path) -> bytes:
        """Digest of one file's content, 32 bytes."""
        stat = path.stat()
        name = str(path.resolve())
        fingerprint = [
            stat.st_size,
            stat.st_mtime_ns,
            stat.st_ctime_ns,
            stat.st_ino,
            stat.st_dev,
        ]
        memory = self._recall()
        known = memory.get(name)
        if isinstance(known, list) and known[:-1] == fingerprint:
            remembered = _digest_of(known[-1])
            if remembered is not None:
                return remembered
        is_settled = self._now_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns) > _SETTLED_NS
        value = blake3(max_threads=blake3.AUTO).update_mmap(path).digest()
        if is_settled:
            memory[name] = [*fingerprint, value.hex()]
            self._remember(memory)
        return value

    def digest_all(self, paths: list[Path]) -> bytes:
        """One digest over several files' contents; their names and order do not matter."""
        digests = sorted(self.digest(path) for path in paths)
        return digest_fields("files", [("file", d) for d in digests])

    def _recall(self) -> dict[str, list]:
        if self._memory_path is None:
            return {}
        try:
            memory = json.loads(self._memory_path.read_bytes())
        except (OSError, ValueError):
            return {}
        return memory if isinstance(memory, dict) else {}

    def _remember(self, memory: dict[str, list]) -> None:
        if self._memory_path is None:
            return
        draft = self._memory_path.with_name(f"{self._memory_path.name}.{os.getpid()}")
        with suppress(OSError):  # a cache that cannot be written costs a hash each time, no model
            self._memory_path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(memory))
            draft.replace(self._memory_path)


def _digest_of(value: object) -> bytes | None:
    """A remembered digest, or None for what is not one."""
    try:
        digest = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        return None
    return digest if len(digest) == DIGEST_BYTES else None
