"""``backup``: a copy of a store as of one moment, made while others write."""

import os
import secrets
import shutil
from contextlib import ExitStack
from pathlib import Path

from chunkcache.errors import StoreError
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.lmdb_errors import store_error
from chunkcache.upkeep.findings import OnProgress
from chunkcache.upkeep.verify import VerifyReport, verify


def backup(
    env: StoreEnvironment,
    target: Path,
    *,
    on_progress: OnProgress = lambda what, done, total: None,
) -> VerifyReport:
    """Copy a store into a new directory, without its free pages.

    The copy is written and examined beside ``target``, and gets that name once it is whole and on
    disk: a backup that was interrupted leaves nothing of that name. It is a store of its own, with
    the same tenant secret; opening it is all that restoring takes.

    Args:
        env: What to copy. Others may go on writing, in this process and in others.
        target: The new directory.
        on_progress: Told how far it is.

    Returns:
        What an examination of the copy found. What is damaged in the store is damaged in the copy.

    Raises:
        StoreError: ``target`` is there already, or cannot be written.
        StoreFullError: The disk has no room for it; nothing is left of it.
        StoreFormatError: The data file itself is damaged.
    """
    target = target.absolute()
    if target.exists() or target.is_symlink():
        raise StoreError(f"{target} is there already; a backup needs a new name")
    partial = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, partial, ignore_errors=True)
        on_progress("copy", 0, 1)
        env.compact_to(partial)
        with StoreEnvironment.open(partial, max_bytes=env.max_bytes, read_only=True) as copy:
            report = verify(copy, on_progress=on_progress)
        try:
            _to_disk(partial)
            os.rename(partial, target)
            _sync(target.parent)
        except OSError as error:
            raise store_error(error, partial) from error
    return report


def _to_disk(directory: Path) -> None:
    (directory / "lock.mdb").unlink(missing_ok=True)
    for name in os.listdir(directory):
        _sync(directory / name)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
