"""``verify``: everything in a store compared with everything it refers to, and mended if wanted.

An examination sees the store as of one moment. Mending happens in the transaction that examines,
so that other writers wait and nothing changes between the two; it is repeated until nothing is
found any more, because mending one fault may show another (a dropped document's chunks, say).
"""

from dataclasses import dataclass

from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.removals import note_repair
from chunkcache.store.transaction import Database, Transaction
from chunkcache.upkeep.check_chunks import check_chunks
from chunkcache.upkeep.check_documents import DocumentFacts, check_documents
from chunkcache.upkeep.check_entries import EntryFacts, check_entries
from chunkcache.upkeep.check_rest import check_quarantine, check_vectors
from chunkcache.upkeep.findings import Checked, Finding, OnProgress

MAX_ROUNDS = 8


@dataclass(frozen=True)
class VerifyReport:
    """What was found in a store.

    Attributes:
        checked: How much was looked at.
        findings: Every fault, in the order in which they were found.
        is_repaired: Whether all of it was mended.
    """

    checked: Checked
    findings: tuple[Finding, ...]
    is_repaired: bool

    @property
    def num_damaged(self) -> int:
        """Faults that make something wrong."""
        return sum(f.is_damage for f in self.findings)

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong now."""
        return self.is_repaired or not self.num_damaged


def verify(
    env: StoreEnvironment,
    *,
    repair: bool = False,
    on_progress: OnProgress = lambda what, done, total: None,
) -> VerifyReport:
    """Examine a store, all checksums and all references in both directions.

    Args:
        env: The store.
        repair: Mend what is found. A document whose record is damaged is restored from its text,
            or dropped and named; damaged entries go to the quarantine and are misses from then
            on; what refers to nothing, and what nothing refers to, is dropped. Nothing else is.
        on_progress: Told how far it is.

    Raises:
        StoreReadOnlyError: ``repair`` in a store that was opened for reading alone.
        StoreFormatError: The data file itself is damaged.
        StoreError: The store cannot be read.
    """
    if not repair:
        with env.read() as txn:
            checked, findings = examine(txn, on_progress)
            return VerifyReport(checked, tuple(findings), is_repaired=False)
    return env.update(lambda txn: _mended(txn, on_progress), frees=True)


def examine(
    txn: Transaction,
    on_progress: OnProgress = lambda what, done, total: None,
    *,
    reads_payloads: bool = True,
) -> tuple[Checked, list[Finding]]:
    """Examine everything that a transaction sees. Changes nothing."""
    documents, entries = DocumentFacts(), EntryFacts()
    findings = [*check_documents(txn, documents, on_progress)]
    findings += check_entries(txn, documents, entries, on_progress, reads_payloads=reads_payloads)
    findings += check_chunks(txn, documents, on_progress)
    findings += check_vectors(txn, documents.references.keys())
    findings += check_quarantine(txn)
    checked = Checked(
        documents=documents.num_documents,
        chunks=len(documents.references),
        entries=txn.num_entries(Database.ENTRIES),
        entry_bytes=entries.num_bytes,
        vectors=txn.num_entries(Database.VECTORS),
        quarantined=txn.num_entries(Database.QUARANTINE),
    )
    return checked, findings


def _mended(txn: Transaction, on_progress: OnProgress) -> VerifyReport:
    checked, findings = examine(txn, on_progress)
    found = list(findings)
    if found:
        note_repair(txn)
    for _ in range(MAX_ROUNDS):
        if not findings:
            return VerifyReport(checked, tuple(found), is_repaired=True)
        for finding in findings:
            finding.mend(txn)
        findings = examine(txn, reads_payloads=False)[1]
        found += [f for f in findings if f not in found]
    return VerifyReport(checked, tuple(found), is_repaired=False)
