"""What an examination of a store finds, as values, each with what mends it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from chunkcache.identity import ChunkKey
from chunkcache.store.disk import delete_entry
from chunkcache.store.transaction import Database, Transaction

Mend = Callable[[Transaction], object]
"""Mends one fault inside the transaction in which it was found."""

OnProgress = Callable[[str, int, int], None]
"""Told what is looked at: its name, how many of it are done, and how many there are."""


class Fault(StrEnum):
    """What can be wrong. Stable: these are codes in reports."""

    DAMAGED_DOCUMENT = "damaged_document"
    ORPHAN_TEXT = "orphan_text"
    WRONG_COUNTERS = "wrong_counters"
    WRONG_EXPIRY = "wrong_expiry"
    DAMAGED_COLLECTION = "damaged_collection"
    MISSING_CHUNK = "missing_chunk"
    DAMAGED_CHUNK = "damaged_chunk"
    WRONG_REFERENCES = "wrong_references"
    FOREIGN_LINK = "foreign_link"
    BROKEN_NEIGHBOURS = "broken_neighbours"
    DAMAGED_ENTRY = "damaged_entry"
    UNLINKED_ENTRY = "unlinked_entry"
    UNTRACED_ENTRY = "untraced_entry"
    DAMAGED_VECTOR = "damaged_vector"
    DAMAGED_QUARANTINE = "damaged_quarantine"
    UNKNOWN_RECORD = "unknown_record"
    UNREFERENCED_CHUNK = "unreferenced_chunk"
    UNREFERENCED_ENTRY = "unreferenced_entry"
    UNREFERENCED_VECTOR = "unreferenced_vector"
    UNREFERENCED_QUARANTINE = "unreferenced_quarantine"
    DANGLING_LINK = "dangling_link"


WASTE = frozenset(
    {
        Fault.UNREFERENCED_CHUNK,
        Fault.UNREFERENCED_ENTRY,
        Fault.UNREFERENCED_VECTOR,
        Fault.UNREFERENCED_QUARANTINE,
        Fault.DANGLING_LINK,
    }
)
"""Faults that make nothing wrong: something lies there that nothing needs."""


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        fault: Its kind.
        what: The document's id, or the record's key in hex.
        detail: What exactly is wrong, and what mending does about it.
        mend: Mends it.
    """

    fault: Fault
    what: str
    detail: str
    mend: Mend = field(repr=False, compare=False)

    @property
    def is_damage(self) -> bool:
        """Whether something is wrong, rather than in vain."""
        return self.fault not in WASTE

    def to_dict(self) -> dict[str, Any]:
        """For a report."""
        return {
            "fault": self.fault.value,
            "damage": self.is_damage,
            "what": self.what,
            "detail": self.detail,
        }


@dataclass(frozen=True)
class Checked:
    """How much was looked at.

    Attributes:
        documents: Documents of all tenants, expired ones included.
        chunks: Distinct chunks of each tenant.
        entries: Entries.
        entry_bytes: Their bytes, all of which were read where checksums were wanted.
        vectors: Embeddings.
        quarantined: Damaged entries that were taken out earlier.
    """

    documents: int
    chunks: int
    entries: int
    entry_bytes: int
    vectors: int
    quarantined: int


def deletes(database: Database, *keys: bytes) -> Mend:
    """Removes records."""

    def mend(txn: Transaction) -> None:
        for key in keys:
            txn.delete(database, key)

    return mend


def drops_entry(key: ChunkKey) -> Mend:
    """Removes an entry, from a remote too."""

    def mend(txn: Transaction) -> None:
        delete_entry(txn, key)

    return mend
