"""A directory that appears all at once or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chunkcache.errors import ModelFilesError


@contextmanager
def drafted_directory(target: Path) -> Iterator[Path]:
    """Gives an empty directory beside ``target``, which takes that name at the end of the block.

    Where the block raises, or the process dies, nothing is at ``target``. Whoever else has put a
    directory there meanwhile wins.

    Raises:
        ModelFilesError: The directory cannot be made, or ``target`` is something else by now.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        workshop = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    except OSError as error:
        raise ModelFilesError(f"{target} cannot be written: {error.strerror}") from error
    try:
        draft = workshop / "draft"
        draft.mkdir()
        yield draft
        for path in draft.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        try:
            draft.replace(target)
        except OSError as error:
            if not (target / "config.json").is_file():
                raise ModelFilesError(f"{target} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def check_room(folder: Path, needed_bytes: int, what: str) -> None:
    """Refuse before anything is read where the disk has no room for what would be written.

    Raises:
        ModelFilesError: With both sizes.
    """
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free_bytes = shutil.disk_usage(existing).free
    if needed_bytes > free_bytes:
        raise ModelFilesError(
            f"converting {what} needs {needed_bytes:,} bytes in {folder}, {free_bytes:,} are free"
        )
