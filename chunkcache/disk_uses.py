"""The disk's budget as settings have it, with the uses that a store remembers of earlier runs."""

from contextlib import suppress

from chunkcache.errors import StoreError
from chunkcache.settings import Settings
from chunkcache.store.disk_budget import DiskBudget, DiskUses
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.eviction.registry import make_eviction
from chunkcache.store.reports import keep_report, load_report

_REPORT = "disk_uses"


def open_disk_budget(settings: Settings, env: StoreEnvironment) -> DiskBudget | None:
    """The budget, if there is one."""
    max_bytes = settings.disk_budget_bytes
    if max_bytes is None:
        return None
    eviction = make_eviction(settings.disk_eviction, max_bytes)
    return DiskBudget(max_bytes, eviction, load_report(env, _REPORT, "", DiskUses))


def keep_disk_uses(budget: DiskBudget | None, env: StoreEnvironment) -> None:
    """What goes first from disk after a restart follows from what was used before it."""
    if budget is not None:
        # Without it, what is on disk counts as used once; a store closed before has kept it.
        with suppress(StoreError):
            keep_report(env, _REPORT, "", budget.uses())
