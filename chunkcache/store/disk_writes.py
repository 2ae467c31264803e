"""Writing to the disk for the tier stack: what goes wrong becomes a reason, since the answer goes on."""

from chunkcache.entry import Entry
from chunkcache.errors import StoreError, StoreFullError, StoreReadOnlyError
from chunkcache.store.disk import DiskTier, Guard
from chunkcache.store.tier import NonFiniteEntryError, NotStored, OverBudgetError, UnownedEntryError


def try_put(disk: DiskTier, entry: Entry, guard: Guard | None) -> bool | NotStored:
    """Keep an entry; whether it was written, as of :meth:`DiskTier.put`, or why it was not kept."""
    try:
        return disk.put(entry, guard)
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
