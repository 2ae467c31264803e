"""``backup``: a copy of a store as of one moment, made while others write."""

from pathlib import Path

from chunkcache.store.environment import StoreEnvironment
from chunkcache.upkeep.findings import OnProgress
from chunkcache.upkeep.new_directory import appearing_whole
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
    with appearing_whole(target) as partial:
        on_progress("copy", 0, 1)
        env.compact_to(partial)
        with StoreEnvironment.open(partial, max_bytes=env.max_bytes, read_only=True) as copy:
            report = verify(copy, on_progress=on_progress)
        (partial / "lock.mdb").unlink(missing_ok=True)
    return report
