"""LMDB's and the system's errors as ours. Knows error codes, not what was being done."""

import errno
import os
import resource
from pathlib import Path

import lmdb

from chunkcache.errors import StoreError, StoreFormatError, StoreFullError

_DISK_FULL_CODES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
)


class MapFullError(StoreFullError):
    """The map has no room as large as it is now; growing it may help. Internal to the store."""


def store_error(error: lmdb.Error | OSError, path: Path) -> StoreError:
    """Translate an error.

    Args:
        error: As raised.
        path: The environment's directory, to see whether a short write means a full disk.
    """
    code = error.errno if isinstance(error, OSError) else error.code
    if isinstance(error, lmdb.MapFullError):
        return MapFullError("the store's map is full")
    if code in _DISK_FULL_CODES or (code == errno.EIO and _is_disk_full(path)):
        return StoreFullError("the disk has no room for this write; nothing of it was kept")
    if isinstance(error, _DAMAGE):
        return StoreFormatError(
            f"the store's data file is damaged ({error}); restore it from a copy, or move it away "
            "to start empty"
        )
    return StoreError(f"the store failed: {error}")


def _is_disk_full(path: Path) -> bool:
    """Whether the file cannot grow: LMDB reports a write that was cut short as an I/O error."""
    stats = os.statvfs(path)
    size_limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size_limit != resource.RLIM_INFINITY:
        return (path / "data.mdb").stat().st_size + stats.f_frsize > size_limit
    return stats.f_bavail == 0
