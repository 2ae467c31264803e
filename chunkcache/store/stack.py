"""The tier stack: host, then disk, then remote, then prefill; one computation per key at a time.

The one owner of entries. Knows no model (a prefill is a callable) and no documents (a guard is
a callable).
"""

import threading
from collections.abc import Iterable, Sequence

from chunkcache.entry import Entry
from chunkcache.errors import RequestCancelledError
from chunkcache.identity import ChunkId, ChunkKey, EntryIdentity, ModelDigest, TenantNamespace
from chunkcache.store.disk import DiskTier, Guard
from chunkcache.store.disk_reads import DiskReads
from chunkcache.store.disk_writes import keep_on_disk
from chunkcache.store.flight import Flight, Flights, Prefill, Wanted
from chunkcache.store.host import HostTier
from chunkcache.store.lease import Lease, Source
from chunkcache.store.load_speed import LoadSpeed
from chunkcache.store.remote.remote_cache import RemoteCache
from chunkcache.store.removal_follower import RemovalFollower
from chunkcache.store.stack_stats import StackCounts, TierStackStats
from chunkcache.store.tier import MissReason, NotStored


class TierStack:
    """Host, disk and remote behind one lookup.

    Args:
        host: Entries in RAM.
        disk: Entries on disk, or none: then nothing outlives the process.
        speed: Knows when computing an entry anew is quicker than reading it; None always reads.
        remote: Entries elsewhere, for a stack with a disk, which keeps what comes from there.
    """

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier | None,
        speed: LoadSpeed | None = None,
        remote: RemoteCache | None = None,
    ) -> None:
        assert remote is None or disk is not None
        self._host = host
        self._disk = disk
        self._remote = remote
        self._wake_remote = (lambda: None) if remote is None else remote.wake
        self._reads = DiskReads(disk, host, speed)
        self._lock = threading.Lock()
        self._counts = StackCounts(("host", "disk", "remote") if remote else ("host", "disk"))
        self._flights = Flights()
        self._removals: RemovalFollower | None = None
        if disk is not None:
            self._removals = RemovalFollower(disk, self._forget, self._forget_all)
            if disk.budget is not None:
                disk.budget.respect(host.is_held)

    def load(
        self,
        identity: EntryIdentity,
        *,
        guard: Guard | None = None,
        traced: Sequence[ChunkId] = (),
        waits: bool = True,
    ) -> Lease | MissReason:
        """Find an entry in the tiers.

        Args:
            identity: What is wanted.
            guard: As in :meth:`load_or_prefill`, for what the remote has and the disk has not;
                without one that is not kept.
            traced: As in :meth:`load_or_prefill`, like ``waits``.
            waits: See there.

        Returns:
            A lease, which the caller releases, or why no tier has the entry.

        Raises:
            StoreError: The store is closed.
        """
        return self._acquire(Wanted(identity, None, guard, traced), waits=waits)

    def load_or_prefill(
        self,
        identity: EntryIdentity,
        prefill: Prefill,
        *,
        guard: Guard | None = None,
        traced: Sequence[ChunkId] = (),
        waits: bool = True,
        may_lend: bool = False,
    ) -> Lease:
        """Find an entry, or compute it and keep it.

        Of all threads that want one key at the same time, one computes and the others wait. If it
        fails they get the same error (its cancellation apart: then the next of them computes),
        nothing is kept, and a later call tries again. What is wanted for a loose text, and is in
        no document, is kept in RAM alone.

        Args:
            identity: What is wanted.
            prefill: Computes the entry of exactly that identity.
            guard: Asked in the transaction that would write the entry to disk whether anything
                still refers to it; the place to record that the entry exists.
            traced: Chunks that the entry holds a trace of. Where the guard could not have them name
                it, and RAM keeps it, it goes from there when one of them is removed.
            waits: Wait for another thread that is at the same entry. The one thread on which
                prefills run must not: that other thread may be waiting for it.
            may_lend: The caller reads the entry and releases it before it asks for anything else.
                Where RAM keeps nothing, the entry is then read where the disk tier has it.

        Returns:
            A lease. If the entry was computed, ``miss`` says why; if it was then not kept,
            ``warning`` says why.

        Raises:
            Exception: Whatever ``prefill`` raised.
        """
        wanted = Wanted(identity, prefill, guard, traced, may_lend)
        found = self._acquire(wanted, waits=waits)
        assert isinstance(found, Lease)
        return found

    def contains(self, key: ChunkKey) -> bool:
        """Whether the disk (or, without one, the host tier) has an entry; reads none of it."""
        return self._disk.contains(key) if self._disk else self._host.contains(key)

    def tier_of(self, key: ChunkKey) -> Source | None:
        """The quickest tier that has an entry, if one does; reads none of it."""
        self.follow_removals()
        if self._host.contains(key):
            return "host"
        return "disk" if self.contains(key) else None

    def drop(self, keys: Iterable[ChunkKey]) -> int:
        """Remove entries from every tier, and keep computations under way from being kept.

        Returns:
            How many entries a tier had.

        Raises:
            StoreError: The disk could not be changed; the entries are gone from RAM all the same.
        """
        wanted = set(keys)
        with self._lock:
            for flight in (f for key in wanted for f in self._flights.of(key)):
                flight.is_dropped = True
        dropped = {key for key in wanted if self._host.discard(key)}
        if self._disk:
            dropped |= self._disk.delete_many(wanted)
        self._wake_remote()
        return len(dropped)

    def follow_removals(self) -> None:
        """Drop from RAM what any process has removed from the store since this was last called.

        Every look-up begins with it; called behind a removal, it frees the memory at once. The disk
        is left alone: another document may have stored the same entry again since.

        Raises:
            StoreError: The store is closed, or cannot be read.
        """
        if self._removals is not None and self._removals.follow():
            self._wake_remote()

    def forget_model(self, model: ModelDigest) -> int:
        """Drop copies in RAM of what a model computed; the disk is left alone.

        Returns:
            How many there were.
        """
        return self._host.discard_matching(lambda identity: identity.model == model)

    def forget_tenant(self, namespace: TenantNamespace) -> int:
        """Drop copies in RAM of a tenant's entries; otherwise as :meth:`forget_model`."""
        return self._host.discard_matching(lambda identity: identity.namespace == namespace)

    def pin(self, entry: Entry, ttl_s: float) -> bool:
        """Keep an entry in RAM for a time; a removal of it ends that too.

        Args:
            entry: From a lease that the caller holds.
            ttl_s: Seconds from now.

        Returns:
            Whether it is pinned now: not if it was removed meanwhile, or the disk could not keep it.

        Raises:
            PinLimitError: Pins would hold more than their share, or there is no room.
        """
        self._host.pin(entry, ttl_s)
        return self._is_still_wanted(entry.key)

    def is_pinned(self, key: ChunkKey) -> bool:
        """Whether an entry is pinned now."""
        return self._host.is_pinned(key)

    def unpin(self, keys: Iterable[ChunkKey]) -> int:
        """End pins; says how many there were."""
        return sum(self._host.unpin(key) for key in keys)

    def expect_use(self, entry: Entry, in_seconds: float) -> bool:
        """Value an entry by a use that a caller announces.

        Args:
            entry: From a lease that the caller holds.
            in_seconds: When it will be used.

        Returns:
            Whether RAM holds it now.
        """
        return self._host.expect_use(entry, in_seconds) and self._is_still_wanted(entry.key)

    def stats(self) -> TierStackStats:
        """A snapshot; counts of different tiers may be a few operations apart."""
        self.follow_removals()
        return self._counts.snapshot(self._host, self._disk, self._remote)

    def check_integrity(self) -> None:
        """Check that the host tier's books balance."""
        self._host.check_integrity()

    def close(self) -> None:
        """Forget everything in RAM, send the remote what it is owed; the environment stays open."""
        self._host.clear()
        if self._remote is not None:
            self._remote.close()

    def _acquire(self, wanted: Wanted, *, waits: bool) -> Lease | MissReason:
        self.follow_removals()
        identity = wanted.identity
        key = identity.key()
        self._counts.lookup()
        host_miss = MissReason.ABSENT
        while True:
            found = self._from_host(key, identity)
            if isinstance(found, Lease):
                return found
            if found is not MissReason.ABSENT:
                host_miss = found
            with self._lock:
                flight, is_leader = self._flights.join(key, host_miss, waits=waits)
            if is_leader:
                return self._lead(wanted, flight)
            assert flight.owner != threading.get_ident(), "a prefill asked for its own entry"
            lease = self._follow(identity, flight, wanted.prefill)
            if lease is not None:
                return lease

    def _from_host(self, key: ChunkKey, identity: EntryIdentity) -> Lease | MissReason:
        lease = self._host.get(key)
        if lease is None:
            return MissReason.ABSENT
        if lease.entry.identity == identity:
            self._counts.hit("host")
            if self._disk is not None:
                self._disk.record_use(identity, lease.entry.num_bytes)
            return lease
        lease.release()
        self._host.discard(key)
        return MissReason.TOKEN_IDS_MISMATCH

    def _lead(self, wanted: Wanted, flight: Flight) -> Lease | MissReason:
        identity, prefill, guard = wanted.identity, wanted.prefill, wanted.guard
        try:
            can_compute = prefill is not None
            found = self._reads.read(identity, may_prefill=can_compute, may_lend=wanted.may_lend)
            if isinstance(found, Lease):
                # Not to be shared: others who wait for the key look for themselves.
                self._counts.hit("disk")
                return found
            if isinstance(found, Entry):
                self._counts.hit("disk")
                return self._publish(flight, found, "disk", None)
            if found is not MissReason.ABSENT:
                flight.miss = found
            if self._remote is not None and found is not MissReason.SLOWER_THAN_PREFILL:
                there = self._remote.read(identity, may_prefill=can_compute)
                if isinstance(there, Entry):
                    self._counts.hit("remote")
                    # What nothing would remove from disk is not written to it.
                    warning: NotStored | None = NotStored.UNOWNED
                    if guard is not None:
                        warning = self.keep(there, guard, wanted.traced, is_from_remote=True)
                    return self._publish(flight, there, "remote", warning)
                if there is not MissReason.ABSENT:
                    flight.miss = there
            self._counts.miss(flight.miss)
            if prefill is None:
                return flight.miss
            entry = prefill()
            assert entry.identity == identity, "a prefill computed another entry"
            self._counts.prefill()
            # What was passed over on disk is there already.
            is_kept = flight.miss is MissReason.SLOWER_THAN_PREFILL
            warning = None if is_kept else self.keep(entry, guard, wanted.traced)
            if warning is NotStored.UNOWNED and identity.is_loose:
                warning = None
            return self._publish(flight, entry, "computed", warning)
        except BaseException as error:
            flight.error = error
            raise
        finally:
            with self._lock:
                self._flights.end(identity.key(), flight)
            flight.done.set()

    def _publish(
        self, flight: Flight, entry: Entry, source: Source, warning: NotStored | None
    ) -> Lease:
        """Make an entry visible to others, unless its key was dropped meanwhile."""
        miss = flight.miss if source == "computed" else None
        # A drop marks the flight under this lock before it removes anything: either it sees what
        # is put here, or this sees the mark.
        with self._lock:
            if flight.is_dropped:
                warning = NotStored.DROPPED
            if warning is not None:
                self._counts.not_stored(warning)
            # What the catalog could not note is not found again when a chunk that the entry holds
            # a trace of goes.
            is_untraced = warning is not None and bool(entry.identity.behind)
            if (
                (warning is None or warning.is_about_the_disk)
                and not flight.is_forgotten
                and not is_untraced
            ):
                lease = self._host.put(entry, source=source, miss=miss, warning=warning)
            else:
                lease = self._host.lease_outside(entry, source, miss=miss, warning=warning)
        flight.entry, flight.warning = entry, warning
        if warning is NotStored.DROPPED and self._disk:
            self._disk.delete(entry.key)
        return lease

    def _follow(
        self, identity: EntryIdentity, flight: Flight, prefill: Prefill | None
    ) -> Lease | None:
        """Wait for another thread's result; ``None`` means look again."""
        flight.done.wait()
        error = flight.error
        if error is not None:
            is_own_affair = isinstance(error, RequestCancelledError) or prefill is None
            if is_own_affair or not isinstance(error, Exception):
                return None
            self._counts.miss(flight.miss)
            raise error
        if flight.entry is None or flight.is_dropped:
            return None
        found = self._from_host(identity.key(), identity)
        if isinstance(found, Lease):
            found.warning = flight.warning
            return found
        self._counts.hit("host")
        return self._host.lease_outside(flight.entry, "host", miss=None, warning=flight.warning)

    def keep(
        self,
        entry: Entry,
        guard: Guard | None,
        traced: Sequence[ChunkId] = (),
        *,
        is_from_remote: bool = False,
    ) -> NotStored | None:
        """Write an entry that the disk has not (any more); arguments as of :meth:`load_or_prefill`.

        Returns:
            Why it was not kept, if it was not.
        """
        if self._removals is not None:  # before the guard: what goes behind its answer is noted
            self._removals.note_unlinked(entry.key, traced)
        is_new = keep_on_disk(self._disk, entry, guard, is_from_remote=is_from_remote)
        if isinstance(is_new, NotStored):
            return is_new
        if self._removals is not None:
            self._removals.note_linked(entry.key, traced)
        if is_new:
            self._counts.stored()
            self._wake_remote()
        return None

    def _forget(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            with self._lock:
                for flight in self._flights.of(key):
                    flight.is_forgotten = True
            self._host.discard(key)

    def _forget_all(self, namespace: TenantNamespace | None) -> None:
        with self._lock:
            for flight in self._flights.all():
                flight.is_forgotten = True
        self._host.discard_matching(lambda i: namespace is None or i.namespace == namespace)

    def _is_still_wanted(self, key: ChunkKey) -> bool:
        """Undo an admission that came behind the entry's removal: the disk loses it first."""
        if self._disk is None or self._disk.contains(key):
            return True
        self._host.discard(key)
        return False
