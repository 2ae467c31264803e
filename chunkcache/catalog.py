"""The catalog: the one source of truth about a tenant's documents.

A document, its chunks, their reference counts, their entries and vectors change in one
transaction. Everything else (indexes, entries in RAM) is derived: it compares
:meth:`Catalog.generation` with its own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, islice
from operator import itemgetter

import msgspec
import numpy as np
import numpy.typing as npt

from chunkcache.catalog_records import (
    ChunkIdsRecord,
    ChunkRecord,
    CounterRecord,
    InfoRecord,
    TextRecord,
    VectorRecord,
    build_document,
    chunk_key,
    counter_key,
    decode_metadata,
    encode_metadata,
    info_key,
    info_prefix,
    info_record,
    info_sort_key,
    text_key,
    text_record,
)
from chunkcache.catalog_values import DeleteResult, DocumentInfo, PutResult
from chunkcache.documents import Document
from chunkcache.entry import Entry
from chunkcache.errors import DocumentNotFoundError, InvalidValueError, StoreFormatError
from chunkcache.identity import DIGEST_BYTES, ChunkId, ChunkKey, TenantNamespace
from chunkcache.store.disk import delete_entry, put_entry
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.records import RecordT, decode_record, encode_record
from chunkcache.store.transaction import Database, Transaction

_SCAN_BATCH = 256


class Catalog:
    """One tenant's documents.

    Args:
        env: The store.
        namespace: The tenant; nothing of another one can be seen or changed.
    """

    def __init__(self, env: StoreEnvironment, namespace: TenantNamespace) -> None:
        self._env = env
        self.namespace = namespace

    def put(self, document: Document, *, entries: Iterable[Entry] = (), now: float) -> PutResult:
        """Store a document, and entries of its chunks, as a whole.

        Args:
            document: Its version and times are ignored: they follow from what is stored.
            entries: Computed entries of its chunks; those whose values are not finite are left out.
            now: Unix seconds.

        Raises:
            InvalidValueError: An entry belongs to none of its chunks.
            StoreFullError: There is no room; nothing was kept.
        """
        owners = {chunk.token_ids: chunk.chunk_id for chunk in document.chunks}
        owned: list[tuple[ChunkId, Entry]] = []
        refused: list[ChunkKey] = []
        for entry in entries:
            owner = owners.get(entry.identity.token_ids)
            if owner is None or entry.identity.namespace != self.namespace:
                raise InvalidValueError("an entry belongs to no chunk of the document")
            if entry.is_finite():
                owned.append((owner, entry))
            else:
                refused.append(entry.key)

        def body(txn: Transaction) -> PutResult:
            old = self._info(txn, document.document_id)
            if old is not None and _is_same(old, document):
                result = PutResult("unchanged", self._document(txn, old))
            else:
                result = self._write(txn, document, old, now)
            for owner, entry in owned:
                put_entry(txn, entry)
                assert self.link_entries_in(txn, owner, [entry.key])
            return replace(result, refused_entry_keys=tuple(refused))

        return self._env.update(body)

    def delete(self, document_id: str) -> DeleteResult:
        """Remove a document, and every chunk, entry and vector that it alone held."""

        def body(txn: Transaction) -> DeleteResult:
            info = self._info(txn, document_id)
            if info is None:
                return DeleteResult(existed=False)
            chunk_ids, entry_keys = self._release_chunks(txn, self._chunk_ids(txn, info))
            txn.delete(Database.DOCUMENTS, info_key(self.namespace, document_id))
            txn.delete(Database.DOCUMENTS, text_key(self.namespace, document_id))
            self._count(txn, -1)
            return DeleteResult(True, chunk_ids, entry_keys)

        return self._env.update(body, frees=True)

    def get(self, document_id: str) -> Document | None:
        """A document, if there is one."""
        return self.get_many([document_id]).get(document_id)

    def require(self, document_id: str) -> Document:
        """A document.

        Raises:
            DocumentNotFoundError: This tenant has none of that id.
        """
        document = self.get(document_id)
        if document is None:
            raise DocumentNotFoundError(
                f"there is no document {document_id!r}", param="document_id"
            )
        return document

    def get_many(self, document_ids: Iterable[str]) -> dict[str, Document]:
        """Those of the documents that exist, all as of one moment."""
        documents: dict[str, Document] = {}
        with self._env.read() as txn:
            for document_id in document_ids:
                info = self._info(txn, document_id)
                if info is not None:
                    documents[document_id] = self._document(txn, info)
        return documents

    def list(self, *, after: str | None = None, limit: int) -> list[DocumentInfo]:
        """Documents in order of their ids (by code point).

        Args:
            after: Begin behind this id, which need not exist.
            limit: At most so many.

        Raises:
            InvalidValueError: ``limit`` is not positive.
        """
        if limit < 1:
            raise InvalidValueError(f"a page of {limit} documents", param="limit")
        with self._env.read() as txn:
            return [_document_info(info) for info in islice(self._infos(txn, after), limit)]

    def count(self) -> int:
        """Documents now."""
        with self._env.read() as txn:
            return self._counter(txn).num_documents

    def generation(self) -> int:
        """A number that grows with every change of this tenant's documents."""
        with self._env.read() as txn:
            return self._counter(txn).generation

    def chunks(self) -> Iterator[tuple[ChunkId, str, int]]:
        """Every chunk of every document: chunk id, document id, index in the document.

        Read in batches, so that a slow caller holds nothing open. A change meanwhile may be seen
        in part: compare :meth:`generation` before and after.
        """
        after: str | None = None
        while True:
            batch: list[tuple[str, Sequence[ChunkId]]] = []
            with self._env.read() as txn:
                for info in islice(self._infos(txn, after), _SCAN_BATCH):
                    batch.append((info.document_id, self._chunk_ids(txn, info)))
            for document_id, chunk_ids in batch:
                for index, chunk_id in enumerate(chunk_ids):
                    yield chunk_id, document_id, index
            if len(batch) < _SCAN_BATCH:
                return
            after = batch[-1][0]

    def link_entries(self, chunk_id: ChunkId, keys: Iterable[ChunkKey]) -> bool:
        """Have entries removed from disk with a chunk.

        An entry that was prepared behind another chunk is linked to that chunk too.

        Returns:
            ``False`` if no document holds the chunk any more; then the entries must not be kept.
        """
        keys = list(keys)
        return self._env.update(lambda txn: self.link_entries_in(txn, chunk_id, keys))

    def link_entries_in(
        self, txn: Transaction, chunk_id: ChunkId, keys: Iterable[ChunkKey]
    ) -> bool:
        """As :meth:`link_entries`, inside a transaction."""
        record = self._chunk(txn, chunk_id)
        if record is None:
            return False
        entry_keys = tuple(sorted({*record.entry_keys, *keys}))
        if entry_keys != record.entry_keys:
            record = msgspec.structs.replace(record, entry_keys=entry_keys)
            self._put_chunk(txn, chunk_id, record)
        return True

    def put_vectors(
        self, embedder_digest: bytes, vectors: Mapping[ChunkId, npt.NDArray[np.float32]]
    ) -> int:
        """Keep embeddings of chunks; they go when the chunk goes.

        Args:
            embedder_digest: 32 bytes that name the embedder.
            vectors: ``[dim]`` each.

        Returns:
            How many were kept: a chunk that is gone takes none.
        """
        encoded = {
            chunk_id: encode_record(VectorRecord(data=_vector_bytes(vector)))
            for chunk_id, vector in vectors.items()
        }

        def body(txn: Transaction) -> int:
            num_kept = 0
            for chunk_id, data in encoded.items():
                if self._chunk(txn, chunk_id) is not None:
                    key = chunk_key(self.namespace, chunk_id) + embedder_digest
                    txn.put(Database.VECTORS, key, data)
                    num_kept += 1
            return num_kept

        return self._env.update(body)

    def get_vectors(
        self, embedder_digest: bytes, chunk_ids: Iterable[ChunkId]
    ) -> dict[ChunkId, npt.NDArray[np.float32]]:
        """Those of the embeddings that are kept, ``[dim]`` each."""
        vectors: dict[ChunkId, npt.NDArray[np.float32]] = {}
        with self._env.read() as txn:
            for chunk_id in chunk_ids:
                key = chunk_key(self.namespace, chunk_id) + embedder_digest
                record = _read(txn, Database.VECTORS, key, VectorRecord, "a vector")
                if record is not None:
                    vectors[chunk_id] = np.frombuffer(record.data, dtype="<f4").copy()
        return vectors

    def _write(
        self, txn: Transaction, document: Document, old: InfoRecord | None, now: float
    ) -> PutResult:
        new_ids = {chunk.chunk_id for chunk in document.chunks}
        old_ids = set(self._chunk_ids(txn, old)) if old else set()
        for chunk_id in sorted(new_ids - old_ids):
            record = self._chunk(txn, chunk_id) or ChunkRecord(num_documents=0)
            self._put_chunk(txn, chunk_id, _with_documents(record, 1))
        removed = self._release_chunks(txn, old_ids - new_ids)
        version = old.version + (old.digest != document.digest) if old else 1
        stored = replace(
            document,
            version=version,
            created_at=old.created_at if old else now,
            updated_at=now,
        )
        document_id = document.document_id
        txn.put(
            Database.DOCUMENTS,
            info_key(self.namespace, document_id),
            encode_record(info_record(stored)),
        )
        txn.put(
            Database.DOCUMENTS,
            text_key(self.namespace, document_id),
            encode_record(text_record(stored)),
        )
        self._count(txn, 0 if old else 1)
        return PutResult("updated" if old else "created", stored, *removed)

    def _release_chunks(
        self, txn: Transaction, chunk_ids: Iterable[ChunkId]
    ) -> tuple[tuple[ChunkId, ...], tuple[ChunkKey, ...]]:
        """Count one document less for each chunk; remove those that no document holds.

        Returns:
            The chunks removed, and the entries removed with them.
        """
        removed_ids: list[ChunkId] = []
        removed_keys: set[ChunkKey] = set()
        for chunk_id in sorted(set(chunk_ids)):
            record = self._chunk(txn, chunk_id)
            if record is None:
                raise StoreFormatError("a document's chunk has no record")
            if record.num_documents > 1:
                self._put_chunk(txn, chunk_id, _with_documents(record, -1))
                continue
            prefix = chunk_key(self.namespace, chunk_id)
            for key in [key for key, _ in txn.scan(Database.VECTORS, prefix)]:
                txn.delete(Database.VECTORS, key)
            for key in map(ChunkKey, record.entry_keys):
                delete_entry(txn, key)
                removed_keys.add(key)
            txn.delete(Database.CHUNKS, prefix)
            removed_ids.append(chunk_id)
        return tuple(removed_ids), tuple(sorted(removed_keys))

    def _infos(self, txn: Transaction, after: str | None) -> Iterator[InfoRecord]:
        """Info records in order of ids, behind ``after``."""
        prefix = info_prefix(self.namespace)
        start = prefix if after is None else info_sort_key(self.namespace, after)
        sort_key_of = itemgetter(slice(None, -DIGEST_BYTES))
        items = txn.scan(Database.DOCUMENTS, prefix, start=start)
        # Ids that share a long beginning lie together, in order of their digests.
        for _, group in groupby(items, key=lambda item: sort_key_of(item[0])):
            infos = [decode_record(data, InfoRecord, "a document") for _, data in group]
            for info in sorted(infos, key=lambda info: info.document_id):
                if after is None or info.document_id > after:
                    yield info

    def _info(self, txn: Transaction, document_id: str) -> InfoRecord | None:
        key = info_key(self.namespace, document_id)
        return _read(txn, Database.DOCUMENTS, key, InfoRecord, "a document")

    def _document(self, txn: Transaction, info: InfoRecord) -> Document:
        return build_document(info, self._text(txn, info, TextRecord))

    def _chunk_ids(self, txn: Transaction, info: InfoRecord) -> Sequence[ChunkId]:
        return [ChunkId(c.chunk_id) for c in self._text(txn, info, ChunkIdsRecord).chunks]

    def _text(self, txn: Transaction, info: InfoRecord, kind: type[RecordT]) -> RecordT:
        key = text_key(self.namespace, info.document_id)
        record = _read(txn, Database.DOCUMENTS, key, kind, "a document")
        if record is None:
            raise StoreFormatError("a document's text is missing")
        return record

    def _chunk(self, txn: Transaction, chunk_id: ChunkId) -> ChunkRecord | None:
        key = chunk_key(self.namespace, chunk_id)
        return _read(txn, Database.CHUNKS, key, ChunkRecord, "a chunk")

    def _put_chunk(self, txn: Transaction, chunk_id: ChunkId, record: ChunkRecord) -> None:
        txn.put(Database.CHUNKS, chunk_key(self.namespace, chunk_id), encode_record(record))

    def _counter(self, txn: Transaction) -> CounterRecord:
        key = counter_key(self.namespace)
        record = _read(txn, Database.DOCUMENTS, key, CounterRecord, "a tenant's counters")
        return record or CounterRecord()

    def _count(self, txn: Transaction, num_new_documents: int) -> None:
        counter = self._counter(txn)
        counter = CounterRecord(
            generation=counter.generation + 1,
            num_documents=counter.num_documents + num_new_documents,
        )
        txn.put(Database.DOCUMENTS, counter_key(self.namespace), encode_record(counter))


def _read(
    txn: Transaction, database: Database, key: bytes, kind: type[RecordT], what: str
) -> RecordT | None:
    data = txn.get(database, key)
    return None if data is None else decode_record(data, kind, what)


def _with_documents(record: ChunkRecord, num_more: int) -> ChunkRecord:
    return msgspec.structs.replace(record, num_documents=record.num_documents + num_more)


def _is_same(info: InfoRecord, document: Document) -> bool:
    return (info.digest, info.metadata, info.tokenizer, info.chunking) == (
        document.digest,
        encode_metadata(document.metadata),
        document.tokenizer,
        document.chunking,
    )


def _document_info(info: InfoRecord) -> DocumentInfo:
    return DocumentInfo(
        document_id=info.document_id,
        version=info.version,
        digest=info.digest.hex(),
        num_tokens=info.num_tokens,
        num_chunks=info.num_chunks,
        num_chars=info.num_chars,
        metadata=decode_metadata(info.metadata),
        created_at=info.created_at,
        updated_at=info.updated_at,
    )


def _vector_bytes(vector: npt.NDArray[np.float32]) -> bytes:
    if vector.ndim != 1 or not np.isfinite(vector).all():
        raise InvalidValueError("an embedding is one row of finite numbers")
    return np.ascontiguousarray(vector, dtype="<f4").tobytes()
