"""Reading the disk for the tier stack: whether it pays, and whether the entry has to be copied.

Knows speeds and where entries go. Doesn't know who waits for them.
"""

import time

from chunkcache.entry import Entry
from chunkcache.identity import EntryIdentity
from chunkcache.store.disk import DiskTier, Loan
from chunkcache.store.host import HostTier
from chunkcache.store.lease import Lease
from chunkcache.store.load_speed import LoadSpeed
from chunkcache.store.tier import MissReason


class DiskReads:
    """How entries come from disk.

    Args:
        disk: Where they are; None: nowhere.
        host: What would keep a copy in RAM. Where it keeps nothing, entries can be lent.
        speed: Knows when computing an entry anew is quicker than reading it; None always reads.
    """

    def __init__(self, disk: DiskTier | None, host: HostTier, speed: LoadSpeed | None) -> None:
        self._disk = disk
        self._host = host
        self._speed = speed
        self._keeps_in_ram = host.stats().capacity_bytes > 0

    def read(
        self, identity: EntryIdentity, *, may_prefill: bool, may_lend: bool
    ) -> Entry | Lease | MissReason:
        """Find an entry.

        Args:
            identity: What is wanted.
            may_prefill: Whether it can be computed instead, if that is quicker.
            may_lend: Whether the caller needs no copy of it.

        Returns:
            A copy, or a lease of the entry where the disk has it, or why there is neither.

        Raises:
            StoreError: The store is closed.
        """
        if self._disk is None:
            return MissReason.ABSENT
        if self._speed is not None and may_prefill:
            num_bytes = self._disk.stored_bytes(identity.key())
            if num_bytes and not self._speed.should_load(num_bytes, identity.num_prefill_rows):
                return MissReason.SLOWER_THAN_PREFILL
        lends = may_lend and not self._keeps_in_ram
        started = time.perf_counter()
        found = self._disk.lend(identity) if lends else self._disk.get(identity)
        if isinstance(found, MissReason):
            return found
        entry = found.entry if isinstance(found, Loan) else found
        self._disk.record_use(identity, entry.num_bytes)
        if self._speed is not None:
            self._speed.note_load(entry.num_bytes, time.perf_counter() - started)
        return self._lease(found) if isinstance(found, Loan) else found

    def _lease(self, loan: Loan) -> Lease:
        """Lease what the disk lends, counted with the host's leases."""
        counted = self._host.lease_outside(loan.entry, "disk", miss=None, warning=None)

        def give_back() -> None:
            counted.release()
            loan.give_back()

        return Lease(loan.entry, "disk", give_back)
