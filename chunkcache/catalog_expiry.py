"""When a tenant's documents expire, in order of time, kept in step within a transaction.

::

    documents   namespace  E  time  id digest   the document's id

``time`` is a big-endian double, so that keys lie in order of it. Knows nothing else of documents.
"""

import struct
from collections.abc import Iterator

from chunkcache.catalog_records import document_digest
from chunkcache.identity import DIGEST_BYTES, TenantNamespace
from chunkcache.store.transaction import Database, Transaction

_TIME = struct.Struct(">d")


def expiry_prefix(namespace: TenantNamespace) -> bytes:
    """What the expiry keys of a namespace begin with."""
    return namespace + b"E"


def expiry_key(namespace: TenantNamespace, expires_at: float, document_id: str) -> bytes:
    """Where it is noted that a document expires.

    Args:
        namespace: The tenant.
        expires_at: Unix seconds, positive and finite.
        document_id: The document.
    """
    return expiry_prefix(namespace) + _TIME.pack(expires_at) + document_digest(document_id)


def noted_time(key: bytes) -> float:
    """The time in an expiry key."""
    return _TIME.unpack(key[-DIGEST_BYTES - _TIME.size : -DIGEST_BYTES])[0]


def put_expiry(
    txn: Transaction, namespace: TenantNamespace, expires_at: float | None, document_id: str
) -> None:
    """Note when a document expires; None is never."""
    if expires_at is not None:
        key = expiry_key(namespace, expires_at, document_id)
        txn.put(Database.DOCUMENTS, key, document_id.encode("utf-8"))


def remove_expiry(
    txn: Transaction, namespace: TenantNamespace, expires_at: float | None, document_id: str
) -> None:
    """Take a note back."""
    if expires_at is not None:
        txn.delete(Database.DOCUMENTS, expiry_key(namespace, expires_at, document_id))


def expired_ids(txn: Transaction, namespace: TenantNamespace, now: float) -> Iterator[str]:
    """Documents that have expired and are still stored, the longest expired first."""
    for key, value in txn.scan(Database.DOCUMENTS, expiry_prefix(namespace)):
        if noted_time(key) > now:
            return
        yield bytes(value).decode("utf-8")
