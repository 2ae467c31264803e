"""What a store owes its remote tier, on record in the store: entries to send, entries to remove.

A record is made in the transaction that stores or deletes the entry, so that neither a crash nor a
dead remote loses it, whichever process of the store does the work in the end. Knows no remote.
"""

import os
import time
from collections.abc import Iterator
from typing import Final

from chunkcache.identity import ChunkKey
from chunkcache.store.records import Record, decoded, encode_record
from chunkcache.store.transaction import Database, Transaction

_ADDRESS: Final = b"remote/address"
_SEND: Final = b"remote-send/"
_REMOVE: Final = b"remote-remove/"


class AddressRecord(Record, frozen=True, kw_only=True):
    """Says that the store has a remote tier, whether or not this process speaks to it.

    Attributes:
        shown: Its URL without secrets.
    """

    shown: str


class OwedRecord(Record, frozen=True, kw_only=True):
    """Something to be done.

    Attributes:
        since: Unix seconds.
        token: Tells a record from a later one of the same entry.
    """

    since: float
    token: bytes


def set_address(txn: Transaction, shown: str) -> str | None:
    """Note which remote the store has; returns the former one's, if it was another."""
    data = txn.get(Database.MANIFEST, _ADDRESS)
    former = None if data is None else decoded(data, AddressRecord)
    if former is not None and former.shown == shown:
        return None
    txn.put(Database.MANIFEST, _ADDRESS, encode_record(AddressRecord(shown=shown)))
    return None if former is None else former.shown


def owe_sending(txn: Transaction, key: ChunkKey) -> None:
    """An entry was stored: the remote should have it, and a removal under way is void."""
    _owe(txn, _SEND, _REMOVE, key)


def owe_removal(txn: Transaction, key: ChunkKey) -> None:
    """An entry was deleted: the remote must not have it, and nobody may read it from there."""
    _owe(txn, _REMOVE, _SEND, key)


def is_to_be_removed(txn: Transaction, key: ChunkKey) -> bool:
    """Whether the remote may still have an entry that was deleted here."""
    return txn.get(Database.MANIFEST, _REMOVE + key) is not None


def to_send(txn: Transaction, after: bytes = b"") -> Iterator[tuple[ChunkKey, bytes]]:
    """Entries to send, in order, with their records.

    Args:
        txn: A transaction.
        after: Begin behind this key.
    """
    start = _SEND + after + b"\0" if after else _SEND
    for key, data in txn.scan(Database.MANIFEST, _SEND, start=start):
        yield ChunkKey(key[len(_SEND) :]), bytes(data)


def to_remove(txn: Transaction) -> Iterator[tuple[ChunkKey, bytes, float]]:
    """Entries to remove, with their records, and since when (Unix seconds)."""
    for key, data in txn.scan(Database.MANIFEST, _REMOVE):
        record = decoded(data, OwedRecord)
        # One that is damaged is still a removal.
        yield ChunkKey(key[len(_REMOVE) :]), bytes(data), record.since if record else 0.0


def settle_sent(txn: Transaction, key: ChunkKey, record: bytes) -> None:
    """What a record asked for is done; a later record of the same entry stays."""
    _settle(txn, _SEND + key, record)


def settle_removed(txn: Transaction, key: ChunkKey, record: bytes) -> None:
    """As :func:`settle_sent`, for a removal."""
    _settle(txn, _REMOVE + key, record)


def count_owed(txn: Transaction) -> tuple[int, int]:
    """How many entries are to be sent, and to be removed."""
    return sum(1 for _ in to_send(txn)), sum(1 for _ in to_remove(txn))


def _owe(txn: Transaction, kind: bytes, other: bytes, key: ChunkKey) -> None:
    if txn.get(Database.MANIFEST, _ADDRESS) is None:
        return
    txn.delete(Database.MANIFEST, other + key)
    record = OwedRecord(since=time.time(), token=os.urandom(8))
    txn.put(Database.MANIFEST, kind + key, encode_record(record))


def _settle(txn: Transaction, name: bytes, record: bytes) -> None:
    present = txn.get(Database.MANIFEST, name)
    if present is not None and bytes(present) == record:
        txn.delete(Database.MANIFEST, name)
