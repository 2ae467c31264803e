"""A directory that appears under its name only once all in it is written and on disk."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from chunkcache.errors import StoreError
from chunkcache.store.lmdb_errors import store_error


@contextmanager
def appearing_whole(target: Path) -> Iterator[Path]:
    """Gives the path of a directory to be made and filled; renamed when the block ends well.

    Args:
        target: The name that it gets; nothing may have it.

    Raises:
        StoreError: Something has that name, or it cannot be written.
        StoreFullError: The disk has no room.
    """
    target = target.absolute()
    if target.exists() or target.is_symlink():
        raise StoreError(f"{target} is there already; give a new name")
    partial = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, partial, ignore_errors=True)
        try:
            yield partial
            for name in os.listdir(partial):
                _sync(partial / name)
            _sync(partial)
            os.rename(partial, target)
            _sync(target.parent)
        except OSError as error:
            raise store_error(error, partial) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
