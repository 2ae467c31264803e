"""The disk tier: entries in LMDB. A damaged entry is met once: it is quarantined and removed."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from chunkcache.entry import Entry
from chunkcache.errors import StoreFormatError, StoreFullError
from chunkcache.identity import ChunkKey, EntryIdentity
from chunkcache.store.disk_budget import DiskBudget
from chunkcache.store.entry_format import (
    DamagedEntryError,
    check_entry,
    decode_entry,
    encode_entry,
    view_entry,
)
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.records import Record, decode_record, encode_record
from chunkcache.store.remote.outbox import owe_removal, owe_sending
from chunkcache.store.removals import Removals, last_removal, note_removal, removals_since
from chunkcache.store.tier import MissReason, NonFiniteEntryError, UnownedEntryError
from chunkcache.store.transaction import Database, Transaction

MAX_QUARANTINED = 1_000
QUARANTINE_HEAD_BYTES = 4_096
_SCAN_BATCH = 64

Guard = Callable[[Transaction], bool]
"""Asked inside the transaction that would store an entry; ``False`` leaves it out."""


@dataclass(frozen=True)
class Loan:
    """An entry where the store keeps it.

    Attributes:
        entry: To be read, never written to, and not at all once it was given back.
        give_back: Ends the loan. Until then a read transaction is open: freed pages are not used
            again, and the map does not grow.
    """

    entry: Entry
    give_back: Callable[[], None]


class QuarantineRecord(Record, frozen=True, kw_only=True):
    """What is kept of a damaged entry.

    Attributes:
        reason: A :class:`MissReason`.
        found_at: Unix seconds.
        num_bytes: Length of the value.
        head: Its first bytes.
    """

    reason: str
    found_at: float
    num_bytes: int
    head: bytes


def put_entry(txn: Transaction, entry: Entry, *, is_from_remote: bool = False) -> bool:
    """Store an entry inside a transaction, unless a sound one is there.

    Where the store has a remote, that it is to be sent there is put on record with it.

    Raises:
        NonFiniteEntryError: It holds NaN or infinities.
    """
    if not entry.is_finite():
        raise NonFiniteEntryError("an entry holds values that are not finite")
    present = txn.get(Database.ENTRIES, entry.key)
    if present is not None:
        try:
            check_entry(present, entry.key)
        except DamagedEntryError as error:
            quarantine_entry(txn, entry.key, present, error.reason)
        else:
            return False
    txn.put(Database.ENTRIES, entry.key, encode_entry(entry))
    if not is_from_remote:
        owe_sending(txn, entry.key)
    return True


def delete_entry(txn: Transaction, key: ChunkKey) -> bool:
    """Remove an entry, and what the quarantine holds of it, inside a transaction.

    Where the store has a remote, that it is to be removed there too is put on record with it,
    whether or not the disk had it.
    """
    owe_removal(txn, key)
    txn.delete(Database.QUARANTINE, key)
    return txn.delete(Database.ENTRIES, key)


def quarantine_entry(txn: Transaction, key: bytes, value: memoryview, reason: MissReason) -> None:
    """Remove a damaged entry inside a transaction, and keep its beginning with the reason."""
    record = QuarantineRecord(
        reason=reason.value,
        found_at=time.time(),
        num_bytes=len(value),
        head=bytes(value[:QUARANTINE_HEAD_BYTES]),
    )
    txn.delete(Database.ENTRIES, key)
    txn.put(Database.QUARANTINE, key, encode_record(record))
    while txn.num_entries(Database.QUARANTINE) > MAX_QUARANTINED:
        oldest = min(
            (decode_record(data, QuarantineRecord, "a quarantine record").found_at, other)
            for other, data in txn.scan(Database.QUARANTINE)
            if other != key
        )
        txn.delete(Database.QUARANTINE, oldest[1])


class DiskTier:
    """Entries in a store's environment; satisfies :class:`chunkcache.store.tier.Tier`.

    Args:
        env: The store.
        budget: Evicts entries so that all of them stay within it; None lets them fill the store.

    Attributes:
        budget: As given.
    """

    name = "disk"

    def __init__(self, env: StoreEnvironment, budget: DiskBudget | None = None) -> None:
        self._env = env
        self.budget = budget
        self._lock = threading.Lock()
        self._quarantined: Counter[MissReason] = Counter()
        self._num_left_in_place = 0

    @property
    def num_entries(self) -> int:
        """Live entries, damaged ones that nobody has met yet included."""
        with self._env.read() as txn:
            return txn.num_entries(Database.ENTRIES)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages that live entries occupy."""
        with self._env.read() as txn:
            return txn.num_bytes(Database.ENTRIES)

    @property
    def num_evicted(self) -> int:
        """Entries that this object has evicted."""
        return self.budget.num_evicted if self.budget else 0

    @property
    def num_quarantined(self) -> int:
        """Damaged entries that this object has met."""
        with self._lock:
            return self._quarantined.total()

    @property
    def num_left_in_place(self) -> int:
        """Damaged entries that could not be removed, because the disk was full."""
        with self._lock:
            return self._num_left_in_place

    def get(self, identity: EntryIdentity) -> Entry | MissReason:
        """Read an entry; see :meth:`chunkcache.store.tier.Tier.get`.

        Raises:
            StoreError: The environment is closed, or was opened before a fork.
        """
        try:
            with self._env.read() as txn:
                value = txn.get(Database.ENTRIES, identity.key())
                if value is None:
                    return MissReason.ABSENT
                return decode_entry(value, identity)
        except DamagedEntryError as error:
            self._remove_damaged(identity, error.reason)
            return error.reason
        except StoreFormatError:
            return MissReason.UNREADABLE

    def stored_bytes(self, key: ChunkKey) -> int:
        """Bytes that an entry of that key has on disk, 0 without one; reads none of them."""
        with self._env.read() as txn:
            value = txn.get(Database.ENTRIES, key)
            return 0 if value is None else len(value)

    def lend(self, identity: EntryIdentity) -> Loan | MissReason:
        """As :meth:`get`, without copying the entry.

        For a caller that reads it at once, and does not write to this store before it gives it back.

        Raises:
            StoreError: As of :meth:`get`.
        """
        try:
            with ExitStack() as stack:
                txn = stack.enter_context(self._env.read())
                value = txn.get(Database.ENTRIES, identity.key())
                if value is None:
                    return MissReason.ABSENT
                entry = view_entry(value, identity)
                return Loan(entry, stack.pop_all().close)
        except DamagedEntryError as error:
            self._remove_damaged(identity, error.reason)
            return error.reason
        except StoreFormatError:
            return MissReason.UNREADABLE

    def contains(self, key: ChunkKey) -> bool:
        """Whether an entry of that key is stored; a damaged one counts until somebody reads it."""
        with self._env.read() as txn:
            return txn.get(Database.ENTRIES, key) is not None

    def put(
        self, entry: Entry, guard: Guard | None = None, *, is_from_remote: bool = False
    ) -> bool:
        """Keep an entry; see :meth:`chunkcache.store.tier.Tier.put`.

        Args:
            entry: What to keep.
            guard: Asked first, in the same transaction.
            is_from_remote: It need not be sent to the store's remote.

        Raises:
            NonFiniteEntryError: It holds NaN or infinities.
            OverBudgetError: The budget has no room for it; nothing was kept.
            StoreFullError: There is no room; nothing was kept.
            StoreReadOnlyError: The store is open for reading alone; the guard had no objection.
            UnownedEntryError: The guard said no.
        """
        if self._env.read_only and guard is not None:
            with self._env.read() as txn:
                if not guard(txn):
                    raise UnownedEntryError

        def body(txn: Transaction) -> tuple[bool, list[ChunkKey]]:
            if guard is not None and not guard(txn):
                raise UnownedEntryError
            if budget is None:
                return put_entry(txn, entry, is_from_remote=is_from_remote), []
            victims = budget.make_room(txn, entry.identity, num_bytes)
            is_new = put_entry(txn, entry, is_from_remote=is_from_remote)
            budget.check(txn)
            return is_new, victims

        budget, num_bytes = self.budget, entry.num_bytes
        if budget is not None:
            budget.note_wanted(entry.identity, num_bytes)
        is_new, victims = self._env.update(body)
        if budget is not None:
            budget.note_stored(entry.identity, num_bytes, victims)
        return is_new

    def put_in(self, txn: Transaction, entry: Entry) -> bool:
        """As :meth:`put`, inside a transaction of the same store, whatever the budget."""
        return put_entry(txn, entry)

    def has_room(self, identity: EntryIdentity, num_bytes: int) -> bool:
        """As :meth:`DiskBudget.has_room`; true without a budget."""
        if self.budget is None:
            return True
        with self._env.read() as txn:
            return self.budget.has_room(txn, identity, num_bytes)

    def would_keep(self, identity: EntryIdentity, num_bytes: int) -> bool:
        """Whether an entry of that size would be kept; counts as the use that asks for it."""
        if self.budget is None:
            return True
        with self._env.read() as txn:
            return self.budget.would_keep(txn, identity, num_bytes)

    @contextmanager
    def sparing(self) -> Iterator[None]:
        """What is stored inside, or named by :meth:`spare`, is not evicted before the end."""
        if self.budget is None:
            yield
            return
        with self.budget.sparing():
            yield

    def spare(self, key: ChunkKey) -> None:
        """Keep an entry that is there from eviction until the end of :meth:`sparing`."""
        if self.budget is not None:
            self.budget.spare(key)

    def record_use(self, identity: EntryIdentity, num_bytes: int) -> None:
        """Note a use of an entry that a quicker tier had."""
        if self.budget is not None:
            self.budget.record_use(identity, num_bytes)

    def delete(self, key: ChunkKey) -> bool:
        """Remove an entry; says whether there was one."""
        return self._env.update(lambda txn: delete_entry(txn, key), frees=True)

    def delete_many(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Remove entries in one transaction; says which there were."""
        wanted = set(keys)

        def body(txn: Transaction) -> set[ChunkKey]:
            note_removal(txn, None, wanted)
            return {key for key in wanted if delete_entry(txn, key)}

        return self._env.update(body, frees=True)

    def removals_since(self, number: int) -> Removals:
        """What any process has removed since a number; 0 is all that is on record."""
        with self._env.read() as txn:
            return removals_since(txn, number)

    def last_removal(self) -> int:
        """Number of the last removal."""
        with self._env.read() as txn:
            return last_removal(txn)

    def check_integrity(self) -> list[tuple[ChunkKey, MissReason]]:
        """Read every entry and name what is damaged. Changes nothing."""
        damaged: list[tuple[ChunkKey, MissReason]] = []
        start = b""
        while True:
            num_read = 0
            with self._env.read() as txn:
                for key, value in txn.scan(Database.ENTRIES, start=start):
                    try:
                        check_entry(value, ChunkKey(key))
                    except DamagedEntryError as error:
                        damaged.append((ChunkKey(key), error.reason))
                    start = key + b"\x00"
                    num_read += 1
                    if num_read == _SCAN_BATCH:
                        break
            if num_read < _SCAN_BATCH:
                return damaged

    def _remove_damaged(self, identity: EntryIdentity, reason: MissReason) -> None:
        with self._lock:
            self._quarantined[reason] += 1
        if self._env.read_only:
            return
        key = identity.key()

        def body(txn: Transaction) -> None:
            value = txn.get(Database.ENTRIES, key)
            if value is None:
                return
            try:
                decode_entry(value, identity)
            except DamagedEntryError as error:
                quarantine_entry(txn, key, value, error.reason)

        try:
            self._env.update(body, frees=True)
        except StoreFullError:
            # It stays where it is, a miss each time, until a recomputed entry replaces it.
            with self._lock:
                self._num_left_in_place += 1
