"""What each chunk is prepared behind, and the references back, kept in step within a transaction.

::

    chunks      namespace  chunk id  B  preparation            NeighboursRecord
                namespace  chunk id  R  chunk id  preparation  nothing: the second is behind the first

Knows nothing of documents, and nothing of entries.
"""

from collections.abc import Sequence

import msgspec

from chunkcache.catalog_records import chunk_key
from chunkcache.catalog_values import Neighbour
from chunkcache.identity import (
    DIGEST_BYTES,
    ChunkId,
    TenantNamespace,
    decode_token_ids,
    encode_token_ids,
)
from chunkcache.store.records import Record, decoded, encode_record
from chunkcache.store.transaction import Database, Transaction

BEHIND = b"B"
"""Follows a chunk's key where it is noted what the chunk is prepared behind."""
REVERSE = b"R"
"""Follows a chunk's key where it is noted that another one is prepared behind it."""


class NeighbourSpan(msgspec.Struct, array_like=True, frozen=True):
    """A chunk that another one is prepared behind, with its tokens."""

    chunk_id: bytes
    token_ids: bytes


class NeighboursRecord(Record, frozen=True, kw_only=True):
    """What a chunk is prepared behind, in the order in which it is read."""

    neighbours: list[NeighbourSpan]


class NeighbourRecords:
    """The neighbours of one tenant's chunks.

    A chunk is recorded behind others once per preparation; a record never changes, it is removed
    when one of its chunks is.

    Args:
        namespace: The tenant.
    """

    def __init__(self, namespace: TenantNamespace) -> None:
        self._namespace = namespace

    def get(self, txn: Transaction, preparation: str, chunk_id: ChunkId) -> tuple[Neighbour, ...]:
        """What a chunk is prepared behind, in order; nothing if there is no sound record of it."""
        data = txn.get(Database.CHUNKS, self._behind_key(chunk_id, preparation.encode()))
        record = None if data is None else decoded(data, NeighboursRecord)
        return tuple(
            Neighbour(ChunkId(n.chunk_id), decode_token_ids(n.token_ids))
            for n in (record.neighbours if record else ())
        )

    def contains(self, txn: Transaction, preparation: str, chunk_id: ChunkId) -> bool:
        """Whether there is a record, sound or not."""
        key = self._behind_key(chunk_id, preparation.encode())
        return txn.get(Database.CHUNKS, key) is not None

    def put(
        self,
        txn: Transaction,
        preparation: str,
        chunk_id: ChunkId,
        neighbours: Sequence[Neighbour],
    ) -> None:
        """Record what a chunk, of which that is not recorded yet, is prepared behind."""
        name = preparation.encode()
        key = self._behind_key(chunk_id, name)
        assert neighbours, "a chunk behind nothing has no record"
        assert txn.get(Database.CHUNKS, key) is None, "a record never changes"
        spans = [NeighbourSpan(n.chunk_id, encode_token_ids(n.token_ids)) for n in neighbours]
        txn.put(Database.CHUNKS, key, encode_record(NeighboursRecord(neighbours=spans)))
        for neighbour in neighbours:
            txn.put(Database.CHUNKS, self._reverse_key(neighbour.chunk_id, chunk_id, name), b"")

    def remove(self, txn: Transaction, chunk_id: ChunkId) -> tuple[set[ChunkId], set[ChunkId]]:
        """Remove every record that a chunk is part of.

        Returns:
            The other chunks of those records; and those of them that were prepared behind it.
        """
        own = chunk_key(self._namespace, chunk_id)
        behind, reverse = own + BEHIND, own + REVERSE
        records = [(chunk_id, key[len(behind) :]) for key, _ in txn.scan(Database.CHUNKS, behind)]
        prepared: set[ChunkId] = set()
        for key, _ in txn.scan(Database.CHUNKS, reverse):
            rest = key[len(reverse) :]
            other = ChunkId(rest[:DIGEST_BYTES])
            prepared.add(other)
            records.append((other, rest[DIGEST_BYTES:]))
        others: set[ChunkId] = set()
        for owner, name in records:
            # Of a damaged record the references back stay: they lead nowhere, and do no harm.
            neighbours = self.get(txn, name.decode(), owner)
            txn.delete(Database.CHUNKS, self._behind_key(owner, name))
            for neighbour in neighbours:
                txn.delete(Database.CHUNKS, self._reverse_key(neighbour.chunk_id, owner, name))
            others.update((owner, *(n.chunk_id for n in neighbours)))
        return others - {chunk_id}, prepared

    def _behind_key(self, chunk_id: ChunkId, name: bytes) -> bytes:
        return behind_key(self._namespace, chunk_id, name)

    def _reverse_key(self, neighbour: ChunkId, chunk_id: ChunkId, name: bytes) -> bytes:
        return reverse_key(self._namespace, neighbour, chunk_id, name)


def behind_key(namespace: TenantNamespace, chunk_id: ChunkId, name: bytes) -> bytes:
    """Where it is noted what a chunk is prepared behind; ``name`` is the preparation's."""
    return chunk_key(namespace, chunk_id) + BEHIND + name


def reverse_key(
    namespace: TenantNamespace, neighbour: ChunkId, chunk_id: ChunkId, name: bytes
) -> bytes:
    """Where it is noted that ``chunk_id`` is prepared behind ``neighbour``."""
    return chunk_key(namespace, neighbour) + REVERSE + chunk_id + name
