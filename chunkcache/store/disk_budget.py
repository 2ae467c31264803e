"""Which entries leave the disk so that all of them together stay within a budget.

How much they take is what LMDB says inside the transaction that decides, so that nothing can drift
from it, whoever else writes. How they were used is remembered in this process, kept as a report now
and then, and counts for choosing alone: where it is lost, entries wait as if used once. Documents,
chunks and embeddings are never touched: an entry can be computed again.
"""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import msgspec

from chunkcache.identity import ChunkKey, EntryIdentity
from chunkcache.store.entry_format import DamagedEntryError, decode_header
from chunkcache.store.eviction.policy import Candidate, EvictionPolicy
from chunkcache.store.tier import OverBudgetError
from chunkcache.store.transaction import Database, Transaction

MAX_REMEMBERED = 1 << 16
_HEADER_BYTES = 8_192
_HEADER_BYTES_PER_TOKEN = 8
"""What an entry's header takes at most, about, beside keys and values."""
_SLACK_PAGES = 4
"""For the tree's own pages, which may split."""


class DiskUses(msgspec.Struct, frozen=True):
    """Uses as they are kept over a restart.

    Attributes:
        num_uses: By the entry's key in hex, in the order of last uses.
    """

    num_uses: dict[str, int]


class DiskBudget:
    """The books of what is on disk. Safe to use from several threads.

    Args:
        max_bytes: Bytes that the pages of all entries may take.
        eviction: Chooses what goes; of this tier alone.
        uses: What an earlier process kept of the entries' uses.

    Attributes:
        max_bytes: As given.
    """

    def __init__(
        self, max_bytes: int, eviction: EvictionPolicy, uses: DiskUses | None = None
    ) -> None:
        self.max_bytes = max_bytes
        self._eviction = eviction
        self._lock = threading.Lock()
        self._uses: dict[ChunkKey, int] = {}
        for key, num_uses in (uses.num_uses if uses else {}).items():
            self._uses[ChunkKey(bytes.fromhex(key))] = num_uses
        self._residents: dict[ChunkKey, int] = {}
        self._asked: set[ChunkKey] = set()
        self._spared: set[ChunkKey] = set()
        # What a run is computing, and will put: several threads must not want the last place at once.
        self._promised: dict[ChunkKey, int] = {}
        self._num_sparing = 0
        self._num_evicted = 0
        # When a run last heard no: it need not weigh every entry again for each further chunk.
        self._full_at: tuple[int, int] | None = None
        self._full_for_bytes = 0
        self._is_held: Callable[[ChunkKey], bool] = lambda key: False

    @property
    def num_evicted(self) -> int:
        """Entries that this process has evicted from disk."""
        with self._lock:
            return self._num_evicted

    def respect(self, is_held: Callable[[ChunkKey], bool]) -> None:
        """Have entries stay that somebody holds: leased, or pinned."""
        self._is_held = is_held

    @contextmanager
    def sparing(self) -> Iterator[None]:
        """What is stored or asked for inside is not evicted before the end.

        Without it, a corpus that is larger than the budget would push itself out as it comes in.
        """
        with self._lock:
            self._num_sparing += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_sparing -= 1
                if not self._num_sparing:
                    self._spared.clear()
                    self._promised.clear()
                    self._full_at = None

    def record_use(self, identity: EntryIdentity, num_bytes: int) -> None:
        """Note one use of an entry, wherever it was found."""
        with self._lock:
            self._record_use(Candidate(identity.key(), num_bytes, identity.num_prefill_rows))

    def spare(self, key: ChunkKey) -> None:
        """An entry that is there is wanted by what runs inside :meth:`sparing`."""
        with self._lock:
            if self._num_sparing:
                self._spared.add(key)

    def has_room(self, txn: Transaction, identity: EntryIdentity, num_bytes: int) -> bool:
        """Whether an entry fits though nothing goes for it; then its room is promised to it.

        Inside :meth:`sparing`, until it is put: many may be computed at once.
        """
        candidate = Candidate(identity.key(), num_bytes, identity.num_prefill_rows)
        room_bytes = _room_bytes(txn, candidate)
        with self._lock:
            taken_bytes = txn.num_bytes(Database.ENTRIES) + sum(self._promised.values())
            if taken_bytes + room_bytes > self.max_bytes:
                return False
            if self._num_sparing:
                self._promised[candidate.key] = room_bytes
            return True

    def would_keep(self, txn: Transaction, identity: EntryIdentity, num_bytes: int) -> bool:
        """Whether an entry would be kept if it were computed; counts as the use that asks for it."""
        candidate = Candidate(identity.key(), num_bytes, identity.num_prefill_rows)
        with self._lock:
            state = (txn.num_entries(Database.ENTRIES), txn.num_bytes(Database.ENTRIES))
            if self._num_sparing and state == self._full_at and num_bytes >= self._full_for_bytes:
                return False
            if candidate.key not in self._asked:
                self._asked.add(candidate.key)
                self._record_use(candidate)
            try:
                self._choose(txn, candidate)
            except OverBudgetError:
                self._asked.discard(candidate.key)
                self._full_at, self._full_for_bytes = state, num_bytes
                return False
            return True

    def note_wanted(self, identity: EntryIdentity, num_bytes: int) -> None:
        """An entry was computed and is about to be put, which counts as a use, once."""
        with self._lock:
            self._promised.pop(identity.key(), None)
            if self._num_sparing:  # before it is on disk, where another thread would find it
                self._spared.add(identity.key())
            if identity.key() in self._asked:
                self._asked.discard(identity.key())
            else:
                self._record_use(Candidate(identity.key(), num_bytes, identity.num_prefill_rows))

    def make_room(
        self, txn: Transaction, identity: EntryIdentity, num_bytes: int
    ) -> list[ChunkKey]:
        """Remove what goes for an entry, inside the transaction that stores it.

        Changes no book: :meth:`note_stored` follows once that is on disk.

        Raises:
            OverBudgetError: What may go does not suffice, or is worth more.
        """
        candidate = Candidate(identity.key(), num_bytes, identity.num_prefill_rows)
        with self._lock:
            victims = self._choose(txn, candidate)
        for key in victims:
            txn.delete(Database.ENTRIES, key)
        return victims

    def check(self, txn: Transaction) -> None:
        """See that a transaction keeps to the budget.

        Raises:
            OverBudgetError: It does not.
        """
        if txn.num_bytes(Database.ENTRIES) > self.max_bytes:
            raise OverBudgetError

    def note_stored(self, identity: EntryIdentity, num_bytes: int, victims: list[ChunkKey]) -> None:
        """The entry is on disk, and what went for it is not."""
        with self._lock:
            self._num_evicted += len(victims)
            for key in victims:
                self._remove(key)
            self._add(Candidate(identity.key(), num_bytes, identity.num_prefill_rows))

    def uses(self) -> DiskUses:
        """What to keep over a restart."""
        with self._lock:
            return DiskUses({key.hex(): n for key, n in self._uses.items()})

    def check_integrity(self, stored: Collection[ChunkKey]) -> None:
        """Compare the books with the disk, where nobody else has written since the last put.

        Raises:
            AssertionError: They differ.
        """
        with self._lock:
            assert self._residents.keys() <= set(stored)
            assert sorted(self._eviction.residents()) == sorted(self._residents)

    def _record_use(self, candidate: Candidate) -> None:
        self._eviction.record_use(candidate)
        self._uses[candidate.key] = self._uses.pop(candidate.key, 0) + 1
        while len(self._uses) > MAX_REMEMBERED:
            del self._uses[next(iter(self._uses))]

    def _choose(self, txn: Transaction, candidate: Candidate) -> list[ChunkKey]:
        if txn.get(Database.ENTRIES, candidate.key) is not None:
            return []  # it is replaced at most, where it is damaged
        taken_bytes = txn.num_bytes(Database.ENTRIES)
        needed_bytes = taken_bytes + _room_bytes(txn, candidate) - self.max_bytes
        if needed_bytes <= 0:
            return []
        self._reconcile(txn)
        movable_bytes = sum(n for key, n in self._residents.items() if self._may_evict(key))
        if needed_bytes > movable_bytes:
            raise OverBudgetError
        victims = self._eviction.victims(candidate, needed_bytes, self._may_evict, must_admit=False)
        if victims is None:
            raise OverBudgetError
        return victims

    def _may_evict(self, key: ChunkKey) -> bool:
        return key not in self._spared and not self._is_held(key)

    def _reconcile(self, txn: Transaction) -> None:
        """Take over what is on disk, whoever put it there; payloads are not read."""
        found = {ChunkKey(k): len(v) for k, v in txn.scan(Database.ENTRIES)}
        for key in self._residents.keys() - found.keys():
            self._remove(key)
        unknown = found.keys() - self._residents.keys()
        known_order = {key: place for place, key in enumerate(self._uses)}
        for key in sorted(unknown, key=lambda k: (known_order.get(k, -1), k)):
            rows = _prefill_rows(txn, key)
            self._eviction.restore(Candidate(key, found[key], rows), self._uses.get(key, 1))
            self._residents[key] = found[key]

    def _add(self, candidate: Candidate) -> None:
        if candidate.key not in self._residents:
            self._eviction.add(candidate)
            self._residents[candidate.key] = candidate.num_bytes

    def _remove(self, key: ChunkKey) -> None:
        if self._residents.pop(key, None) is not None:
            self._eviction.remove(key, is_evicted=True)


def _room_bytes(txn: Transaction, candidate: Candidate) -> int:
    """Bytes of pages that an entry takes at most, about."""
    header_bytes = _HEADER_BYTES + _HEADER_BYTES_PER_TOKEN * candidate.saved_tokens
    num_pages = -(-(candidate.num_bytes + header_bytes) // txn.page_bytes) + _SLACK_PAGES
    return num_pages * txn.page_bytes


def _prefill_rows(txn: Transaction, key: ChunkKey) -> int:
    value = txn.get(Database.ENTRIES, key)
    assert value is not None
    try:
        return decode_header(value).identity().num_prefill_rows
    except DamagedEntryError:
        return 1  # of no worth: it goes first
