"""Dropping what is cached of one tenant's documents; the documents themselves stay."""

from dataclasses import dataclass
from typing import Literal

from chunkcache.catalog import Catalog
from chunkcache.runtime import Runtime

ClearedTier = Literal["host", "disk"]


@dataclass(frozen=True)
class Cleared:
    """What was dropped.

    Attributes:
        num_entries: Entries of chunks.
        num_prompt_tokens: Tokens of finished prompts.
    """

    num_entries: int
    num_prompt_tokens: int


def clear_entries(runtime: Runtime, catalog: Catalog, tiers: "set[ClearedTier]") -> Cleared:
    """Drop a tenant's entries and finished prompts; they are computed again when asked for.

    Args:
        runtime: Where they are.
        catalog: Whose they are.
        tiers: From where. What goes from disk goes from RAM too.

    Raises:
        StoreReadOnlyError: The store was opened for reading alone, and the disk is meant.
        StoreError: The store failed.
    """
    num_dropped = runtime.stack.drop(catalog.entry_keys()) if "disk" in tiers else 0
    num_dropped += runtime.stack.forget_tenant(catalog.namespace)
    return Cleared(num_dropped, runtime.kept.drop_tenant(catalog.namespace))
