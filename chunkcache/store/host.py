"""The host tier: entries in RAM, least recently used out first, leased entries never.

Knows nothing of other tiers. One lock guards everything; no call does work that grows with the
size of an entry.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass

from chunkcache.entry import Entry
from chunkcache.identity import ChunkKey
from chunkcache.store.lease import ByteLedger, Lease, Source
from chunkcache.store.tier import MissReason, NotStored


@dataclass(eq=False)
class _Resident:
    """An entry whose bytes are in the ledger.

    Attributes:
        entry: The entry.
        num_leases: Leases out on it.
        is_listed: Whether lookups find it; one that was discarded while leased is not found, and
            its bytes return with its last lease.
    """

    entry: Entry
    num_leases: int = 0
    is_listed: bool = True


@dataclass(frozen=True)
class HostStats:
    """A snapshot of the host tier.

    Attributes:
        capacity_bytes: Budget.
        used_bytes: Bytes held, discarded but still leased entries included.
        num_entries: Entries that lookups find.
        num_leases: Leases out, those on entries that were not admitted included.
        hits: Lookups that found their entry.
        misses: Lookups that did not.
        evictions: Entries pushed out by others.
        rejections: Entries not admitted: larger than the budget, or than what is not leased.
    """

    capacity_bytes: int
    used_bytes: int
    num_entries: int
    num_leases: int
    hits: int
    misses: int
    evictions: int
    rejections: int


class HostTier:
    """Entries in RAM within a byte budget.

    Args:
        capacity_bytes: Budget; 0 keeps nothing.
    """

    name = "host"

    def __init__(self, capacity_bytes: int) -> None:
        self._lock = threading.Lock()
        self._ledger = ByteLedger(capacity_bytes)
        self._residents: OrderedDict[ChunkKey, _Resident] = OrderedDict()
        self._unlisted: set[_Resident] = set()
        self._num_leases = 0
        self._hits = self._misses = self._evictions = self._rejections = 0

    def get(self, key: ChunkKey) -> Lease | None:
        """Lease an entry, and make it the most recently used."""
        with self._lock:
            resident = self._residents.get(key)
            if resident is None:
                self._misses += 1
                return None
            self._hits += 1
            return self._lease(resident, "host", None, None)

    def put(
        self,
        entry: Entry,
        *,
        source: Source = "computed",
        miss: MissReason | None = None,
        warning: NotStored | None = None,
    ) -> Lease:
        """Admit an entry, evicting others, and lease it.

        Where there is an entry of that key already, that one is leased: entries are immutable.
        Where there is no room for it, the lease holds an entry that the tier does not.

        Args:
            entry: The entry; the tier keeps its tensors as they are.
            source: What the lease says about where the entry comes from.
            miss: Passed on to the lease.
            warning: Passed on to the lease.
        """
        with self._lock:
            resident = self._residents.get(entry.key)
            if resident is None:
                if not self._make_room(entry.num_bytes):
                    self._rejections += 1
                    return self._lease_outside(entry, source, miss, warning)
                self._ledger.take(entry.num_bytes)
                resident = self._residents[entry.key] = _Resident(entry)
            return self._lease(resident, source, miss, warning)

    def lease_outside(
        self, entry: Entry, source: Source, *, miss: MissReason | None, warning: NotStored | None
    ) -> Lease:
        """Lease an entry that the tier is not to keep."""
        with self._lock:
            return self._lease_outside(entry, source, miss, warning)

    def contains(self, key: ChunkKey) -> bool:
        """Whether an entry is resident."""
        with self._lock:
            return key in self._residents

    def discard(self, key: ChunkKey) -> bool:
        """Make lookups miss an entry from now on; its memory is free once nobody leases it."""
        with self._lock:
            return self._discard(key)

    def clear(self) -> None:
        """Discard every entry."""
        with self._lock:
            for key in list(self._residents):
                self._discard(key)

    def stats(self) -> HostStats:
        """A consistent snapshot."""
        with self._lock:
            return HostStats(
                capacity_bytes=self._ledger.capacity_bytes,
                used_bytes=self._ledger.used_bytes,
                num_entries=len(self._residents),
                num_leases=self._num_leases,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                rejections=self._rejections,
            )

    def check_integrity(self) -> None:
        """Count everything one by one and compare.

        Raises:
            AssertionError: Books and holdings differ.
        """
        with self._lock:
            residents = [*self._residents.values(), *self._unlisted]
            self._ledger.check_integrity(sum(r.entry.num_bytes for r in residents))
            assert all(r.num_leases >= 0 for r in residents)
            assert sum(r.num_leases for r in residents) <= self._num_leases
            assert all(r.is_listed and r.entry.key == k for k, r in self._residents.items())
            assert all(not r.is_listed and r.num_leases for r in self._unlisted)

    def _lease(
        self,
        resident: _Resident,
        source: Source,
        miss: MissReason | None,
        warning: NotStored | None,
    ) -> Lease:
        resident.num_leases += 1
        self._num_leases += 1
        self._residents.move_to_end(resident.entry.key)
        return Lease(
            resident.entry, source, lambda: self._release(resident), miss=miss, warning=warning
        )

    def _lease_outside(
        self, entry: Entry, source: Source, miss: MissReason | None, warning: NotStored | None
    ) -> Lease:
        self._num_leases += 1
        return Lease(entry, source, self._release_outside, miss=miss, warning=warning)

    def _release(self, resident: _Resident) -> None:
        with self._lock:
            assert resident.num_leases > 0
            resident.num_leases -= 1
            self._num_leases -= 1
            if not resident.is_listed and resident.num_leases == 0:
                self._unlisted.remove(resident)
                self._ledger.give_back(resident.entry.num_bytes)

    def _release_outside(self) -> None:
        with self._lock:
            assert self._num_leases > 0
            self._num_leases -= 1

    def _discard(self, key: ChunkKey) -> bool:
        resident = self._residents.pop(key, None)
        if resident is None:
            return False
        resident.is_listed = False
        if resident.num_leases:
            self._unlisted.add(resident)
        else:
            self._ledger.give_back(resident.entry.num_bytes)
        return True

    def _make_room(self, num_bytes: int) -> bool:
        """Evict until ``num_bytes`` are free; evicts nothing if that cannot be reached."""
        victims: list[ChunkKey] = []
        free_bytes = self._ledger.free_bytes
        for key, resident in self._residents.items():
            if free_bytes >= num_bytes:
                break
            if resident.num_leases == 0:
                victims.append(key)
                free_bytes += resident.entry.num_bytes
        if free_bytes < num_bytes:
            return False
        for key in victims:
            self._discard(key)
        self._evictions += len(victims)
        return True
