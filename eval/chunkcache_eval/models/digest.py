"""How long it takes to know which weights a model has: cold, warm, and remembered."""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chunkcache.model.weights_digest import FileDigests

_BLOCK_BYTES = 1 << 24
_AGE_NS = 60 * 10**9

Progress = Callable[[str], None]


@dataclass(frozen=True)
class DigestResult:
    """Times of one digest.

    Attributes:
        megabytes: Size of the file.
        cold_seconds: With nothing of it in the page cache.
        warm_seconds: Read a moment ago.
        remembered_seconds: Known from the memory beside it.
    """

    megabytes: int
    cold_seconds: float
    warm_seconds: float
    remembered_seconds: float


def measure_digest(megabytes: int, progress: Progress = lambda line: None) -> DigestResult:
    """Write a file of random bytes and digest it three times.

    Args:
        megabytes: Its size, in units of 10**6 bytes.
        progress: Told what is going on.
    """
    with tempfile.TemporaryDirectory(prefix="chunkcache-eval-") as folder:
        path = Path(folder) / "weights"
        progress(f"writing {megabytes} MB")
        rest = megabytes * 10**6
        with open(path, "wb") as file:
            while rest:
                rest -= file.write(os.urandom(min(_BLOCK_BYTES, rest)))
            file.flush()
            os.fsync(file.fileno())
            _forget_pages(file.fileno())
        memory = Path(folder) / "memory.json"
        progress("digesting")
        cold, warm, remembered = (
            _seconds(lambda d=digests: d.digest(path))
            for digests in (FileDigests(None), FileDigests(memory, _later), FileDigests(memory))
        )
        return DigestResult(megabytes, cold, warm, remembered)


def _later() -> int:
    """A time at which the file is old enough to be remembered."""
    return time.time_ns() + _AGE_NS


def _forget_pages(file_number: int) -> None:
    """Drop a file from the page cache, where the system can do that."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file_number, 0, 0, os.POSIX_FADV_DONTNEED)


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
