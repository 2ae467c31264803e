"""What a tier stack has counted."""

from collections.abc import Mapping
from dataclasses import dataclass

from chunkcache.store.tier import MissReason, NotStored


@dataclass(frozen=True)
class TierStackStats:
    """A snapshot of all tiers.

    Attributes:
        lookups: Calls of ``load`` and ``load_or_prefill``.
        hits: Lookups served, by tier.
        misses: Lookups that no tier could serve, by reason.
        prefills: Entries computed.
        stored: Entries written to disk.
        not_stored: Entries computed and served but not kept, by reason.
        bytes: Bytes held, by tier.
        entries: Entries held, by tier.
        evictions: Entries pushed out of the host tier.
        disk_evictions: Entries that this process has evicted from disk for others.
        rejections: Entries that the host tier did not let in.
        pinned_bytes: Bytes of the host tier's pinned entries.
        quarantined: Damaged entries met on disk.
        leases_open: Leases not yet released.
    """

    lookups: int
    hits: Mapping[str, int]
    misses: Mapping[MissReason, int]
    prefills: int
    stored: int
    not_stored: Mapping[NotStored, int]
    bytes: Mapping[str, int]
    entries: Mapping[str, int]
    evictions: int
    disk_evictions: int
    rejections: int
    pinned_bytes: int
    quarantined: int
    leases_open: int
