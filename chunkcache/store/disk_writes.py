"""Writing an entry to disk for the tier stack: what went wrong is a reason, not an error."""

from chunkcache.entry import Entry
from chunkcache.errors import StoreError, StoreFullError, StoreReadOnlyError
from chunkcache.store.disk import DiskTier, Guard
from chunkcache.store.tier import NonFiniteEntryError, NotStored, OverBudgetError, UnownedEntryError


def keep_on_disk(
    disk: DiskTier | None, entry: Entry, guard: Guard | None, *, is_from_remote: bool = False
) -> bool | NotStored:
    """Write an entry that the disk has not (any more).

    Args:
        disk: Where; None: nowhere.
        entry: What.
        guard: As of :meth:`DiskTier.put`.
        is_from_remote: As of :meth:`DiskTier.put`.

    Returns:
        Whether it was written: not where it is there already. Or why it was not kept.
    """
    if disk is None:
        return False if entry.is_finite() else NotStored.NON_FINITE
    try:
        return disk.put(entry, guard, is_from_remote=is_from_remote)
    except NonFiniteEntryError:
        return NotStored.NON_FINITE
    except UnownedEntryError:
        return NotStored.UNOWNED
    except OverBudgetError:
        return NotStored.OVER_BUDGET
    except StoreFullError:
        return NotStored.STORE_FULL
    except StoreReadOnlyError:
        return NotStored.READ_ONLY
    except StoreError:
        return NotStored.STORE_ERROR
