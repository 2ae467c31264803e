"""A tenant's chunks within a transaction: who holds them, and what goes when nobody does any more.

A chunk counts the documents that hold it and names the entries that hold a trace of it: its own,
and those prepared behind it. Knows nothing of documents.
"""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from chunkcache.catalog_neighbours import NeighbourRecords
from chunkcache.catalog_records import ChunkRecord, chunk_key, read_record
from chunkcache.catalog_values import Neighbour, Removed
from chunkcache.errors import StoreFormatError
from chunkcache.identity import DIGEST_BYTES, ChunkId, ChunkKey, TenantNamespace
from chunkcache.store.disk import delete_entry
from chunkcache.store.records import decoded, encode_record
from chunkcache.store.removals import note_removal
from chunkcache.store.transaction import Database, Transaction


class ChunkRecords:
    """The chunks of one tenant.

    Args:
        namespace: The tenant.
    """

    def __init__(self, namespace: TenantNamespace) -> None:
        self._namespace = namespace
        self._neighbours = NeighbourRecords(namespace)

    def contains(self, txn: Transaction, chunk_id: ChunkId) -> bool:
        """Whether a document holds the chunk."""
        return txn.get(Database.CHUNKS, chunk_key(self._namespace, chunk_id)) is not None

    def hold(self, txn: Transaction, chunk_ids: Iterable[ChunkId]) -> None:
        """Count one document more for each chunk."""
        for chunk_id in sorted(set(chunk_ids)):
            record = self._get(txn, chunk_id) or ChunkRecord(num_documents=0)
            self._put(txn, chunk_id, replace(record, num_documents=record.num_documents + 1))

    def release(self, txn: Transaction, chunk_ids: Iterable[ChunkId]) -> Removed:
        """Count one document less for each chunk; remove those that no document holds.

        With a chunk go its vectors, its entries, the entries prepared behind it, and the records of
        neighbours that it is part of.
        """
        removed_ids: list[ChunkId] = []
        removed_keys: set[ChunkKey] = set()
        unprepared_ids: set[ChunkId] = set()
        for chunk_id in sorted(set(chunk_ids)):
            record = self._require(txn, chunk_id)
            if record.num_documents > 1:
                self._put(txn, chunk_id, replace(record, num_documents=record.num_documents - 1))
                continue
            prefix = chunk_key(self._namespace, chunk_id)
            for key in [key for key, _ in txn.scan(Database.VECTORS, prefix)]:
                txn.delete(Database.VECTORS, key)
            keys = set(map(ChunkKey, record.entry_keys))
            for key in keys:
                delete_entry(txn, key)
            others, prepared = self._neighbours.remove(txn, chunk_id)
            for other in others:
                self._unlink(txn, other, keys)
            txn.delete(Database.CHUNKS, prefix)
            removed_ids.append(chunk_id)
            removed_keys |= keys
            unprepared_ids |= prepared
        note_removal(txn, self._namespace, removed_keys, removed_ids)
        return Removed(
            chunk_ids=tuple(removed_ids),
            entry_keys=tuple(sorted(removed_keys)),
            unprepared_chunk_ids=tuple(sorted(unprepared_ids.difference(removed_ids))),
        )

    def link_entry(self, txn: Transaction, key: ChunkKey, chunk_ids: Sequence[ChunkId]) -> bool:
        """Have an entry removed with any of some chunks.

        Returns:
            ``False``, and nothing is linked, if no document holds one of them any more. A transaction
            that only reads says the same, and links nothing.
        """
        records = {chunk_id: self._get(txn, chunk_id) for chunk_id in chunk_ids}
        if None in records.values():
            return False
        if txn.is_read_only:
            return True
        for chunk_id, record in records.items():
            if record is not None and key not in record.entry_keys:
                entry_keys = tuple(sorted((*record.entry_keys, key)))
                self._put(txn, chunk_id, replace(record, entry_keys=entry_keys))
        return True

    def entry_keys(self, txn: Transaction) -> list[ChunkKey]:
        """The entries of all chunks; damaged records are left out."""
        found: set[bytes] = set()
        for key, data in txn.scan(Database.CHUNKS, self._namespace):
            record = decoded(data, ChunkRecord) if len(key) == 2 * DIGEST_BYTES else None
            found.update(record.entry_keys if record else ())
        return [ChunkKey(key) for key in sorted(found)]

    def neighbours(
        self, txn: Transaction, preparation: str, chunk_id: ChunkId
    ) -> tuple[Neighbour, ...]:
        """What a chunk is prepared behind, in order; nothing if that is not recorded."""
        return self._neighbours.get(txn, preparation, chunk_id)

    def put_neighbours(
        self,
        txn: Transaction,
        preparation: str,
        chunk_id: ChunkId,
        neighbours: Sequence[Neighbour],
    ) -> bool:
        """Record what a chunk is prepared behind, unless that is recorded already.

        Returns:
            Whether it is recorded now: no, if no document holds it, or one of its neighbours, or
            if a damaged record is in the way.
        """
        if self._neighbours.contains(txn, preparation, chunk_id):
            # A damaged one is not replaced: entries hold traces of what stood in it, until a repair
            # drops both.
            return bool(self._neighbours.get(txn, preparation, chunk_id))
        if not all(self.contains(txn, c) for c in (chunk_id, *(n.chunk_id for n in neighbours))):
            return False
        self._neighbours.put(txn, preparation, chunk_id, neighbours)
        return True

    def _unlink(self, txn: Transaction, chunk_id: ChunkId, keys: set[ChunkKey]) -> None:
        record = self._get(txn, chunk_id)
        if record is None:  # gone, and a reference back to it was left of a damaged record
            return
        entry_keys = tuple(key for key in record.entry_keys if key not in keys)
        if entry_keys != record.entry_keys:
            self._put(txn, chunk_id, replace(record, entry_keys=entry_keys))

    def _get(self, txn: Transaction, chunk_id: ChunkId) -> ChunkRecord | None:
        key = chunk_key(self._namespace, chunk_id)
        return read_record(txn, Database.CHUNKS, key, ChunkRecord, "a chunk")

    def _require(self, txn: Transaction, chunk_id: ChunkId) -> ChunkRecord:
        record = self._get(txn, chunk_id)
        if record is None:
            raise StoreFormatError("a chunk that is referred to has no record")
        return record

    def _put(self, txn: Transaction, chunk_id: ChunkId, record: ChunkRecord) -> None:
        txn.put(Database.CHUNKS, chunk_key(self._namespace, chunk_id), encode_record(record))
