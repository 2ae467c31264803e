"""The log of what went with deleted documents, which other processes apply to their RAM.

::

    removals    number, big-endian    RemovalRecord

A record is written in the transaction that removes: whoever sees the store without a document sees
the record too. The log is bounded; a reader that has missed some of it is told so, and forgets
everything. Knows no tier.
"""

import struct
from collections.abc import Collection
from dataclasses import dataclass

from chunkcache.identity import ChunkId, ChunkKey, TenantNamespace
from chunkcache.store.records import Record, decoded, encode_record
from chunkcache.store.transaction import Database, Transaction

MAX_LOG_BYTES = 1 << 20
MAX_DIGESTS_PER_RECORD = 8_192
_NUMBER = struct.Struct(">Q")


class RemovalRecord(Record, frozen=True, kw_only=True):
    """What one transaction removed.

    Attributes:
        namespace: Whose it was; None where it may be anybody's.
        entry_keys: Entries.
        chunk_ids: Chunks, for copies in RAM that no chunk's record names.
        is_whole: Whether it was too much to be listed: then all of ``namespace`` is meant.
    """

    namespace: bytes | None
    entry_keys: list[bytes]
    chunk_ids: list[bytes]
    is_whole: bool = False


@dataclass(frozen=True)
class Removals:
    """What was removed since some number.

    Attributes:
        last: Number of the last record.
        records: In order.
        is_complete: Whether nothing in between is missing or damaged.
    """

    last: int
    records: tuple[RemovalRecord, ...] = ()
    is_complete: bool = True


def note_removal(
    txn: Transaction,
    namespace: TenantNamespace | None,
    entry_keys: Collection[ChunkKey],
    chunk_ids: Collection[ChunkId] = (),
) -> None:
    """Log what a transaction removes; nothing where there is nothing.

    Args:
        txn: The transaction.
        namespace: Whose it is; None where it may be anybody's.
        entry_keys: Entries, whether they were on disk or in the RAM of some process alone.
        chunk_ids: Chunks that no document holds any more.
    """
    if not entry_keys and not chunk_ids:
        return
    is_whole = len(entry_keys) + len(chunk_ids) > MAX_DIGESTS_PER_RECORD
    record = RemovalRecord(
        namespace=namespace,
        entry_keys=[] if is_whole else sorted(entry_keys),
        chunk_ids=[] if is_whole else sorted(chunk_ids),
        is_whole=is_whole,
    )
    _append(txn, record)


def note_repair(txn: Transaction) -> None:
    """Log that anything may have been removed."""
    _append(txn, RemovalRecord(namespace=None, entry_keys=[], chunk_ids=[], is_whole=True))


def last_removal(txn: Transaction) -> int:
    """Number of the last record, 0 without one; one small read."""
    key = txn.last_key(Database.REMOVALS)
    return 0 if key is None else _NUMBER.unpack(key)[0]


def removals_since(txn: Transaction, number: int) -> Removals:
    """What was logged behind a number."""
    last = last_removal(txn)
    if last == number:
        return Removals(last)
    found = [*txn.scan(Database.REMOVALS, start=_NUMBER.pack(number + 1))]
    records = [decoded(data, RemovalRecord) for _, data in found]
    sound = tuple(record for record in records if record is not None)
    return Removals(last, sound, is_complete=len(sound) == last - number)


def _append(txn: Transaction, record: RemovalRecord) -> None:
    newest = _NUMBER.pack(last_removal(txn) + 1)
    txn.put(Database.REMOVALS, newest, encode_record(record))
    while txn.num_bytes(Database.REMOVALS) > MAX_LOG_BYTES:
        oldest = txn.first_key(Database.REMOVALS)
        if oldest is None or oldest == newest:
            return
        txn.delete(Database.REMOVALS, oldest)
