"""The host tier: entries in RAM within a byte budget; leased and pinned entries are not evicted.

Knows no other tiers, and not how a victim is chosen. One lock guards everything; no call does work
that grows with the size of an entry.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from chunkcache.entry import Entry
from chunkcache.errors import PinLimitError
from chunkcache.identity import ChunkKey, EntryIdentity
from chunkcache.store.eviction.policy import Candidate, EvictionPolicy
from chunkcache.store.eviction.value import ValuePolicy
from chunkcache.store.lease import ByteLedger, Lease, Source
from chunkcache.store.pins import Pins
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
        pinned_bytes: Bytes of pinned entries.
        num_entries: Entries that lookups find.
        num_leases: Leases out, those on entries that were not admitted included.
        hits: Lookups that found their entry.
        misses: Lookups that did not.
        evictions: Entries pushed out by others.
        rejections: Entries not admitted: larger than what can be freed, or worth less than what
            they would push out.
    """

    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
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
        eviction: Chooses what goes; of this tier alone. None is the default policy.
        max_pinned_ratio: Share of the budget that pins may hold.
        clock: Seconds, for the ends of pins.
    """

    name = "host"

    def __init__(
        self,
        capacity_bytes: int,
        eviction: EvictionPolicy | None = None,
        *,
        max_pinned_ratio: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._ledger = ByteLedger(capacity_bytes)
        self._eviction = eviction or ValuePolicy()
        self._pins = Pins(int(capacity_bytes * max_pinned_ratio), clock)
        self._residents: dict[ChunkKey, _Resident] = {}
        self._unlisted: set[_Resident] = set()
        self._leased_bytes = 0
        self._num_leases = 0
        self._hits = self._misses = self._evictions = self._rejections = 0

    def get(self, key: ChunkKey) -> Lease | None:
        """Lease an entry, which counts as a use of it."""
        with self._lock:
            resident = self._residents.get(key)
            if resident is None:
                self._misses += 1
                return None
            self._hits += 1
            self._eviction.record_use(_candidate(resident.entry))
            return self._lease(resident, "host", None, None)

    def put(
        self,
        entry: Entry,
        *,
        source: Source = "computed",
        miss: MissReason | None = None,
        warning: NotStored | None = None,
    ) -> Lease:
        """Admit an entry, evicting others, and lease it; which counts as a use of it.

        Where there is an entry of that key already, that one is leased: entries are immutable.
        Where there is no room for it, or others are worth more, the lease holds an entry that the
        tier does not.

        Args:
            entry: The entry; the tier keeps its tensors as they are.
            source: What the lease says about where the entry comes from.
            miss: Passed on to the lease.
            warning: Passed on to the lease.
        """
        with self._lock:
            self._eviction.record_use(_candidate(entry))
            resident = self._residents.get(entry.key) or self._admit(entry, must_admit=False)
            if resident is None:
                self._rejections += 1
                return self._lease_outside(entry, source, miss, warning)
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

    def is_held(self, key: ChunkKey) -> bool:
        """Whether an entry is leased or pinned now."""
        with self._lock:
            resident = self._residents.get(key)
            return resident is not None and (resident.num_leases > 0 or key in self._pins)

    def pin(self, entry: Entry, ttl_s: float) -> None:
        """Keep an entry from eviction for a time, admitting it if need be.

        Args:
            entry: What to pin. A removal of its document still takes it.
            ttl_s: Seconds from now; a pin that is there already is not made shorter.

        Raises:
            PinLimitError: Pins would hold more than their share, or there is no room.
        """
        with self._lock:
            self._pins.check_room(entry.key, entry.num_bytes)
            if entry.key not in self._residents and self._admit(entry, must_admit=True) is None:
                raise PinLimitError(
                    "what is in use at present leaves no room for the pinned chunks"
                )
            self._pins.add(entry.key, entry.num_bytes, ttl_s)

    def is_pinned(self, key: ChunkKey) -> bool:
        """Whether an entry is pinned now."""
        with self._lock:
            return key in self._pins

    def unpin(self, key: ChunkKey) -> bool:
        """End a pin; says whether there was one."""
        with self._lock:
            return self._pins.remove(key)

    def expect_use(self, entry: Entry, in_seconds: float) -> bool:
        """Value an entry by a use that a caller announces, admitting it if it is worth that.

        Returns:
            Whether it is resident.
        """
        with self._lock:
            self._eviction.expect_use(entry.key, in_seconds)
            if entry.key in self._residents:
                return True
            return self._admit(entry, must_admit=False) is not None

    def discard(self, key: ChunkKey) -> bool:
        """Make lookups miss an entry from now on; its memory is free once nobody leases it.

        One that was evicted before has left a history, which goes too.
        """
        with self._lock:
            was_resident = self._discard(key, is_evicted=False)
            if not was_resident:
                self._eviction.forget(key)
            return was_resident

    def discard_matching(self, matches: Callable[[EntryIdentity], bool]) -> int:
        """Discard every entry whose identity matches; returns how many there were."""
        with self._lock:
            keys = [k for k, r in self._residents.items() if matches(r.entry.identity)]
            for key in keys:
                self._discard(key, is_evicted=False)
        return len(keys)

    def clear(self) -> None:
        """Discard every entry."""
        with self._lock:
            for key in list(self._residents):
                self._discard(key, is_evicted=False)

    def stats(self) -> HostStats:
        """A consistent snapshot."""
        with self._lock:
            return HostStats(
                capacity_bytes=self._ledger.capacity_bytes,
                used_bytes=self._ledger.used_bytes,
                pinned_bytes=self._pins.num_bytes,
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
            leased_bytes = sum(r.entry.num_bytes for r in residents if r.num_leases)
            assert leased_bytes == self._leased_bytes, (leased_bytes, self._leased_bytes)
            assert all(r.is_listed and r.entry.key == k for k, r in self._residents.items())
            assert all(not r.is_listed and r.num_leases for r in self._unlisted)
            assert sorted(self._eviction.residents()) == sorted(self._residents)
            self._pins.check_integrity({k: r.entry.num_bytes for k, r in self._residents.items()})

    def _lease(
        self,
        resident: _Resident,
        source: Source,
        miss: MissReason | None,
        warning: NotStored | None,
    ) -> Lease:
        if resident.num_leases == 0:
            self._leased_bytes += resident.entry.num_bytes
        resident.num_leases += 1
        self._num_leases += 1
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
            if resident.num_leases:
                return
            self._leased_bytes -= resident.entry.num_bytes
            if not resident.is_listed:
                self._unlisted.remove(resident)
                self._ledger.give_back(resident.entry.num_bytes)

    def _release_outside(self) -> None:
        with self._lock:
            assert self._num_leases > 0
            self._num_leases -= 1

    def _discard(self, key: ChunkKey, *, is_evicted: bool) -> bool:
        resident = self._residents.pop(key, None)
        if resident is None:
            return False
        self._eviction.remove(key, is_evicted=is_evicted)
        self._pins.remove(key)
        resident.is_listed = False
        if resident.num_leases:
            self._unlisted.add(resident)
        else:
            self._ledger.give_back(resident.entry.num_bytes)
        return True

    def _admit(self, entry: Entry, *, must_admit: bool) -> _Resident | None:
        """Make an entry resident; evicts nothing if that cannot be, or is not worth it."""
        candidate = _candidate(entry)
        needed_bytes = entry.num_bytes - self._ledger.free_bytes
        if needed_bytes > 0:
            if needed_bytes > self._evictable_bytes():
                return None
            victims = self._eviction.victims(
                candidate, needed_bytes, self._may_evict, must_admit=must_admit
            )
            if victims is None:
                return None
            for key in victims:
                self._discard(key, is_evicted=True)
            self._evictions += len(victims)
        self._ledger.take(entry.num_bytes)
        self._eviction.add(candidate)
        resident = self._residents[entry.key] = _Resident(entry)
        return resident

    def _may_evict(self, key: ChunkKey) -> bool:
        return self._residents[key].num_leases == 0 and key not in self._pins

    def _evictable_bytes(self) -> int:
        self._pins.expire()
        pinned_bytes = sum(
            self._residents[key].entry.num_bytes
            for key in self._pins
            if self._residents[key].num_leases == 0
        )
        return self._ledger.used_bytes - self._leased_bytes - pinned_bytes


def _candidate(entry: Entry) -> Candidate:
    """What a policy knows of an entry."""
    return Candidate(entry.key, entry.num_bytes, entry.identity.num_prefill_rows)
