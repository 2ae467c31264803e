"""Embeddings of a tenant's chunks within a transaction. Knows neither embedders nor documents."""

import numpy as np
import numpy.typing as npt

from chunkcache.catalog_records import VectorRecord, chunk_key
from chunkcache.errors import InvalidValueError
from chunkcache.identity import ChunkId, TenantNamespace
from chunkcache.store.records import decoded, encode_record
from chunkcache.store.transaction import Database, Transaction


def encode_vector(vector: npt.NDArray[np.float32]) -> bytes:
    """The record of an embedding ``[dim]``.

    Raises:
        InvalidValueError: It is not one row of finite numbers.
    """
    if vector.ndim != 1 or not np.isfinite(vector).all():
        raise InvalidValueError("an embedding is one row of finite numbers")
    data = np.ascontiguousarray(vector, dtype="<f4").tobytes()
    return encode_record(VectorRecord(data=data))


def put_vector(
    txn: Transaction,
    namespace: TenantNamespace,
    chunk_id: ChunkId,
    embedder_digest: bytes,
    record: bytes,
) -> None:
    """Keep a record of :func:`encode_vector`, replacing an older one of the same embedder."""
    txn.put(Database.VECTORS, chunk_key(namespace, chunk_id) + embedder_digest, record)


def get_vector(
    txn: Transaction, namespace: TenantNamespace, chunk_id: ChunkId, embedder_digest: bytes
) -> npt.NDArray[np.float32] | None:
    """An embedding ``[dim]``, if it is kept; a damaged one is not there, and is made anew."""
    data = txn.get(Database.VECTORS, chunk_key(namespace, chunk_id) + embedder_digest)
    record = None if data is None else decoded(data, VectorRecord)
    return None if record is None else np.frombuffer(record.data, dtype="<f4").copy()
