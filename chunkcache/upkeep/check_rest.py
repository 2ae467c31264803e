"""Checks of what lies beside chunks and entries: embeddings, and what is left of damaged entries."""

from collections.abc import Iterator, Set

from chunkcache.catalog_records import ChunkRecord, VectorRecord
from chunkcache.identity import DIGEST_BYTES
from chunkcache.store.disk import QuarantineRecord
from chunkcache.store.records import decoded
from chunkcache.store.transaction import Database, Transaction
from chunkcache.upkeep.findings import Fault, Finding, deletes

_VECTORS, _QUARANTINE = Database.VECTORS, Database.QUARANTINE
_CHUNK_KEY_BYTES = 2 * DIGEST_BYTES


def check_vectors(txn: Transaction, held: Set[bytes]) -> Iterator[Finding]:
    """Check every embedding.

    Args:
        txn: A transaction; nothing is changed in it.
        held: Keys of the chunks that documents hold.
    """
    for key, data in txn.scan(_VECTORS):
        mend = deletes(_VECTORS, key)
        if len(key) != _CHUNK_KEY_BYTES + DIGEST_BYTES:
            yield Finding(Fault.UNKNOWN_RECORD, key.hex(), "no record has such a key", mend)
        elif key[:_CHUNK_KEY_BYTES] not in held:
            detail = "no document holds its chunk; it is dropped"
            yield Finding(Fault.UNREFERENCED_VECTOR, key.hex(), detail, mend)
        else:
            record = decoded(data, VectorRecord)
            if record is None or len(record.data) % 4:
                detail = "an embedding is damaged; it is dropped and computed again"
                yield Finding(Fault.DAMAGED_VECTOR, key.hex(), detail, mend)


def check_quarantine(txn: Transaction) -> Iterator[Finding]:
    """Check what is kept of damaged entries; it must go with their chunks, as they would have."""
    kept = {key: bytes(data) for key, data in txn.scan(_QUARANTINE)}
    if not kept:
        return
    named: set[bytes] = set()
    for key, data in txn.scan(Database.CHUNKS):
        record = decoded(data, ChunkRecord) if len(key) == _CHUNK_KEY_BYTES else None
        named.update(kept.keys() & set(record.entry_keys) if record else ())
    for key, data in kept.items():
        if decoded(data, QuarantineRecord) is None:
            detail = "a record of the quarantine is damaged; it is dropped"
            yield Finding(Fault.DAMAGED_QUARANTINE, key.hex(), detail, deletes(_QUARANTINE, key))
        elif key not in named:
            detail = "no chunk names the entry that it is left of; it is dropped"
            yield Finding(
                Fault.UNREFERENCED_QUARANTINE, key.hex(), detail, deletes(_QUARANTINE, key)
            )
