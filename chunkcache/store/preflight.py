"""What is looked at before a store's files are trusted: directory, lock file, truncation."""

import os
from pathlib import Path

import lmdb
import psutil
from lmdb import verify

from chunkcache.errors import StoreError, StoreFormatError

MAX_READERS = 1024
_NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "9p", "fuse.sshfs", "ceph", "glusterfs", "lustre")
LOCK_FILE_BYTES = 65664
"""What LMDB makes of ``MAX_READERS``: one cache line each, after a header."""


def check_directory(path: Path, *, read_only: bool) -> Path:
    """Make sure that a store can live in a directory.

    Args:
        path: The directory; made if missing, unless ``read_only``.
        read_only: Whether reading is all that is wanted.

    Returns:
        The directory with symlinks resolved.

    Raises:
        StoreError: It is missing, not a directory or not usable.
    """
    try:
        if not read_only:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        resolved = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise StoreError(f"the store directory {path} cannot be used: {error}") from error
    if not resolved.is_dir():
        raise StoreError(f"the store path {path} is not a directory")
    needed = os.R_OK | os.X_OK | (0 if read_only else os.W_OK)
    if not os.access(resolved, needed):
        raise StoreError(
            f"the store directory {path} is not {'readable' if read_only else 'writable'}"
        )
    if read_only and not (resolved / "data.mdb").is_file():
        raise StoreError(f"there is no store in {path}, and read-only mode makes none")
    return resolved


def network_filesystem(directory: Path) -> str | None:
    """Type of the network filesystem that holds a directory, if one does.

    LMDB's locks and its map do not work between the hosts of such a filesystem.
    """
    best: tuple[int, str] = (-1, "")
    for partition in psutil.disk_partitions(all=True):
        if directory.is_relative_to(partition.mountpoint):
            # Of nested mounts the innermost counts, of those at one place the last.
            depth = len(Path(partition.mountpoint).parts)
            if depth >= best[0]:
                best = (depth, partition.fstype)
    return best[1] if best[1].startswith(_NETWORK_FILESYSTEMS) else None


def reserve_lock_file(directory: Path) -> None:
    """Give the lock file its blocks on disk now.

    LMDB maps it for writing: a page without a block would end the process with a bus error on a
    full disk. Called before LMDB opens it, because closing a descriptor of a file drops every lock
    that the process holds on it.

    Raises:
        OSError: The file cannot be written, or the disk has no room even for it.
    """
    descriptor = os.open(directory / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # A file that another process made keeps its size: that is how LMDB counts reader slots.
        os.posix_fallocate(descriptor, 0, os.fstat(descriptor).st_size or LOCK_FILE_BYTES)
    finally:
        os.close(descriptor)


def check_not_truncated(env: lmdb.Environment, directory: Path, *, read_only: bool) -> None:
    """Refuse a data file that ends before a page in use: touching that page kills the process.

    A sound file can end early too, when its last pages were freed in the transaction that took
    them (see :func:`pad_data_file`). So a short file is walked page by page, without the map,
    before it is refused. The walk sees the first page of a large value alone; padding turns a
    tail that is missing into zeros, which checksums find.

    Raises:
        StoreFormatError: It is truncated or damaged.
    """
    data = directory / "data.mdb"
    if _num_missing_bytes(env, data) <= 0:
        return
    if read_only:
        raise StoreFormatError(
            f"{data} ends early: it is truncated, or its writer was killed. Open the store once "
            "for writing to find out; restore it from a copy, or move it away to start empty"
        )
    # Holding the write lock keeps other processes from changing the file during the walk.
    with env.begin(write=True):
        problems = verify.verify(os.fspath(directory)) if _num_missing_bytes(env, data) > 0 else []
    if problems:
        raise StoreFormatError(
            f"{data} is truncated or damaged ({problems[0]}); restore it from a copy, or move the "
            "directory away to start empty"
        )
    pad_data_file(env, directory)


def pad_data_file(env: lmdb.Environment, directory: Path) -> None:
    """Lengthen the data file to its last page, if it ends before.

    LMDB never writes pages that were taken and freed within one transaction, and yet counts them
    as part of the file. Without them a file looks truncated.
    """
    data = directory / "data.mdb"
    if _num_missing_bytes(env, data) <= 0:
        return
    # The write lock: another process could have written there since.
    with env.begin(write=True):
        num_missing_bytes = _num_missing_bytes(env, data)
        if num_missing_bytes > 0:
            os.truncate(data, data.stat().st_size + num_missing_bytes)


def _num_missing_bytes(env: lmdb.Environment, data: Path) -> int:
    needed_bytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    return needed_bytes - data.stat().st_size
