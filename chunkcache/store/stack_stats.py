"""What a tier stack has counted."""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from chunkcache.store.disk import DiskTier
from chunkcache.store.host import HostTier
from chunkcache.store.remote.remote_cache import RemoteCache
from chunkcache.store.remote.stats import RemoteStats
from chunkcache.store.tier import MissReason, NotStored


@dataclass(frozen=True)
class TierStackStats:
    """A snapshot of all tiers.

    Attributes:
        lookups: Calls of ``load`` and ``load_or_prefill``.
        hits: Lookups served, by tier.
        misses: Lookups that no tier could serve, by reason.
        prefills: Entries computed.
        stored: Entries written to disk, those that came from the remote included.
        not_stored: Entries computed and served but not kept, by reason.
        bytes: Bytes held, by tier.
        entries: Entries held, by tier.
        evictions: Entries pushed out of the host tier.
        disk_evictions: Entries that this process has evicted from disk for others.
        rejections: Entries that the host tier did not let in.
        pinned_bytes: Bytes of the host tier's pinned entries.
        quarantined: Damaged entries met on disk.
        leases_open: Leases not yet released.
        remote: What the remote tier has counted; None where there is none.
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
    remote: RemoteStats | None


class StackCounts:
    """Counts what a stack does. Any thread may call any method.

    Args:
        tiers: Names of the tiers that serve lookups.
    """

    def __init__(self, tiers: tuple[str, ...]) -> None:
        self._lock = threading.Lock()
        self._hits: Counter[str] = Counter(dict.fromkeys(tiers, 0))
        self._misses: Counter[MissReason] = Counter()
        self._not_stored: Counter[NotStored] = Counter()
        self._lookups = self._prefills = self._stored = 0

    def lookup(self) -> None:
        """An entry was asked for."""
        with self._lock:
            self._lookups += 1

    def hit(self, tier: str) -> None:
        """A tier had it."""
        with self._lock:
            self._hits[tier] += 1

    def miss(self, reason: MissReason) -> None:
        """No tier had it."""
        with self._lock:
            self._misses[reason] += 1

    def prefill(self) -> None:
        """It was computed."""
        with self._lock:
            self._prefills += 1

    def stored(self) -> None:
        """It was written to disk."""
        with self._lock:
            self._stored += 1

    def not_stored(self, reason: NotStored) -> None:
        """It was not kept."""
        with self._lock:
            self._not_stored[reason] += 1

    def snapshot(
        self, host: HostTier, disk: DiskTier | None, remote: RemoteCache | None
    ) -> TierStackStats:
        """All counts, and what the tiers hold; some may be a few operations apart."""
        ram = host.stats()
        disk_bytes, disk_entries = (disk.num_bytes, disk.num_entries) if disk else (0, 0)
        remote_stats = remote.stats() if remote else None
        with self._lock:
            return TierStackStats(
                lookups=self._lookups,
                hits=dict(self._hits),
                misses=dict(self._misses),
                prefills=self._prefills,
                stored=self._stored,
                not_stored=dict(self._not_stored),
                bytes={"host": ram.used_bytes, "disk": disk_bytes},
                entries={"host": ram.num_entries, "disk": disk_entries},
                evictions=ram.evictions,
                disk_evictions=disk.num_evicted if disk else 0,
                rejections=ram.rejections,
                pinned_bytes=ram.pinned_bytes,
                quarantined=disk.num_quarantined if disk else 0,
                leases_open=ram.num_leases,
                remote=remote_stats,
            )
