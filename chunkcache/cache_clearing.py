"""Dropping what is cached of one tenant's documents; the documents themselves stay."""

from typing import Literal

from chunkcache.catalog import Catalog
from chunkcache.runtime import Runtime

ClearedTier = Literal["host", "disk"]


def clear_entries(runtime: Runtime, catalog: Catalog, tiers: "set[ClearedTier]") -> int:
    """Drop a tenant's entries; they are computed again when they are asked for.

    Args:
        runtime: Where they are.
        catalog: Whose they are.
        tiers: From where. What goes from disk goes from RAM too.

    Returns:
        How many went.

    Raises:
        StoreReadOnlyError: The store was opened for reading alone, and the disk is meant.
        StoreError: The store failed.
    """
    num_dropped = runtime.stack.drop(catalog.entry_keys()) if "disk" in tiers else 0
    return num_dropped + runtime.stack.forget_tenant(catalog.namespace)
