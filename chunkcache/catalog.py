"""The catalog: the one source of truth about a tenant's documents.

A document, its chunks, their reference counts, their entries and vectors change in one
transaction. Everything else (indexes, entries in RAM) is derived: it compares
:meth:`Catalog.generation` with its own.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from chunkcache.catalog_chunks import ChunkRecords
from chunkcache.catalog_counters import TenantCounters
from chunkcache.catalog_expiry import expired_ids, put_expiry, remove_expiry
from chunkcache.catalog_records import (
    ChunkIdsRecord,
    InfoRecord,
    TextRecord,
    build_document,
    document_info,
    info_key,
    info_record,
    is_record_of,
    read_record,
    scan_infos,
    text_key,
    text_record,
)
from chunkcache.catalog_values import DeleteResult, DocumentInfo, Neighbour, PutResult, Removed
from chunkcache.catalog_vectors import encode_vector, get_vector, put_vector
from chunkcache.document_collections import DocumentCollections
from chunkcache.documents import Document
from chunkcache.entry import Entry
from chunkcache.errors import DocumentNotFoundError, InvalidValueError, StoreFormatError
from chunkcache.identity import ChunkId, ChunkKey, TenantNamespace
from chunkcache.quota import DocumentSize, TenantQuota
from chunkcache.store.disk import put_entry
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.records import RecordT, decoded, encode_record
from chunkcache.store.transaction import Database, Transaction

_SCAN_BATCH = 256


class Catalog:
    """One tenant's documents.

    Args:
        env: The store.
        namespace: The tenant; nothing of another one can be seen or changed.
        clock: Unix seconds now. A document that has expired is treated as if it were not there,
            and lies in the store until it is collected.
        quota: What its documents may take; None is no limit.

    Attributes:
        collections: Named sets of the documents.
    """

    def __init__(
        self,
        env: StoreEnvironment,
        namespace: TenantNamespace,
        clock: Callable[[], float] = time.time,
        quota: TenantQuota | None = None,
    ) -> None:
        self._env = env
        self._clock = clock
        self.namespace = namespace
        self._chunks = ChunkRecords(namespace)
        self._counters = TenantCounters(namespace, quota)
        self.collections = DocumentCollections(env, namespace, self._counters, clock)

    def put(self, document: Document, *, entries: Iterable[Entry] = (), now: float) -> PutResult:
        """Store a document, and entries of its chunks, as a whole.

        Args:
            document: Its version and times are ignored: they follow from what is stored.
            entries: Computed entries of its chunks; those whose values are not finite are left out.
            now: Unix seconds.

        Raises:
            InvalidValueError: An entry belongs to none of its chunks, or was prepared behind one
                that no document holds.
            StoreFullError: There is no room, or the tenant's quota is used up; nothing was kept.
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
            result = self.put_in(txn, document, now=now)
            for owner, entry in owned:
                put_entry(txn, entry)
                if not self.link_entry_in(txn, entry.key, [owner, *entry.identity.behind]):
                    raise InvalidValueError("an entry was prepared behind a chunk that is gone")
            return replace(result, refused_entry_keys=tuple(refused))

        return self._env.update(body)

    def put_in(self, txn: Transaction, document: Document, *, now: float) -> PutResult:
        """As :meth:`put`, inside a transaction and without entries."""
        old = self._info(txn, document.document_id)
        if old is None:
            return self._write(txn, document, None, now)
        if old.is_expired(now):
            # In two changes, so that no generation stands for both what was and what is.
            removed = self._remove(txn, old)
            return replace(self._write(txn, document, None, now), removed=removed)
        if is_record_of(old, document):
            return PutResult("unchanged", self._document(txn, old))
        return self._write(txn, document, old, now)

    def delete(self, document_id: str) -> DeleteResult:
        """Remove a document, and every chunk, entry and vector that it alone held.

        Entries of other chunks that were prepared behind one of these go too.
        """

        def body(txn: Transaction) -> DeleteResult:
            info = self._info(txn, document_id)
            if info is None:
                return DeleteResult(existed=False)
            return DeleteResult(not info.is_expired(now), self._remove(txn, info))

        now = self._clock()
        return self._env.update(body, frees=True)

    def expired_in(self, txn: Transaction, now: float) -> "list[str]":
        """Documents that have expired and are still stored, inside a transaction."""
        return [*expired_ids(txn, self.namespace, now)]

    def delete_expired_in(self, txn: Transaction, now: float) -> "dict[str, Removed]":
        """Remove every document that has expired, inside a transaction; what went with each."""
        infos = [self._info(txn, document_id) for document_id in self.expired_in(txn, now)]
        return {info.document_id: self._remove(txn, info) for info in infos if info is not None}

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
        now = self._clock()
        with self._env.read() as txn:
            for document_id in document_ids:
                info = self._info(txn, document_id)
                if info is not None and not info.is_expired(now):
                    documents[document_id] = self._document(txn, info)
        return documents

    def list(self, *, after: str | None = None, limit: int) -> list[DocumentInfo]:
        """Documents in order of their ids (by code point); without damaged ones.

        Args:
            after: Begin behind this id, which need not exist.
            limit: At most so many.

        Raises:
            InvalidValueError: ``limit`` is not positive.
        """
        if limit < 1:
            raise InvalidValueError(f"a page of {limit} documents", param="limit")
        now = self._clock()
        with self._env.read() as txn:
            live = (
                info for info in scan_infos(txn, self.namespace, after) if not info.is_expired(now)
            )
            return [document_info(info) for info in islice(live, limit)]

    def count(self) -> int:
        """Documents now."""
        now = self._clock()
        with self._env.read() as txn:
            return self._counters.get(txn).num_documents - len(self.expired_in(txn, now))

    def size(self) -> DocumentSize:
        """What the documents take now."""
        with self._env.read() as txn:
            return self._counters.get(txn).size

    def generation(self) -> int:
        """A number that grows with every change of this tenant's documents.

        It grows when a document expires, and not again when that is collected.
        """
        now = self._clock()
        with self._env.read() as txn:
            return self._counters.get(txn).generation + len(self.expired_in(txn, now))

    def chunks(self) -> Iterator[tuple[ChunkId, str, int]]:
        """Every chunk of every sound document: chunk id, document id, index in the document.

        Read in batches, so that a slow caller holds nothing open. A change meanwhile may be seen
        in part: compare :meth:`generation` before and after.
        """
        after: str | None = None
        now = self._clock()
        while True:
            batch: list[tuple[str, Sequence[ChunkId]]] = []
            with self._env.read() as txn:
                for info in islice(scan_infos(txn, self.namespace, after), _SCAN_BATCH):
                    is_live = not info.is_expired(now)
                    chunk_ids = self._sound_chunk_ids(txn, info) if is_live else ()
                    batch.append((info.document_id, chunk_ids))
            for document_id, chunk_ids in batch:
                for index, chunk_id in enumerate(chunk_ids):
                    yield chunk_id, document_id, index
            if len(batch) < _SCAN_BATCH:
                return
            after = batch[-1][0]

    def held_chunks(self, chunk_ids: Iterable[ChunkId]) -> set[ChunkId]:
        """Those of the chunks that a document holds, all as of one moment."""
        with self._env.read() as txn:
            return {c for c in chunk_ids if self._chunks.contains(txn, c)}

    def entry_keys(self) -> "list[ChunkKey]":
        """Every entry that a chunk of a document is said to have."""
        with self._env.read() as txn:
            return self._chunks.entry_keys(txn)

    def link_entry(self, key: ChunkKey, chunk_ids: Sequence[ChunkId]) -> bool:
        """Have an entry removed from disk with any of some chunks.

        Args:
            key: The entry.
            chunk_ids: Every chunk that it holds a trace of: its own, and those that it was
                prepared behind.

        Returns:
            ``False`` if no document holds one of them any more; then the entry must not be kept.
        """
        return self._env.update(lambda txn: self.link_entry_in(txn, key, chunk_ids))

    def link_entry_in(self, txn: Transaction, key: ChunkKey, chunk_ids: Sequence[ChunkId]) -> bool:
        """As :meth:`link_entry`, inside a transaction."""
        return self._chunks.link_entry(txn, key, chunk_ids)

    def put_neighbours(
        self, preparation: str, neighbours: Mapping[ChunkId, Sequence[Neighbour]]
    ) -> int:
        """Record what chunks are prepared behind; what is recorded already stays as it is.

        The chunks are of this tenant, as any chunk is that this catalog knows. That they are of
        documents in the same collections is the caller's to see to.

        Args:
            preparation: Canonical text of the preparation.
            neighbours: In the order in which they are read; at least one each.

        Returns:
            Of how many chunks it is recorded now: a chunk that is gone, or a neighbour of which
            is gone, gets no record.
        """

        def body(txn: Transaction) -> int:
            return sum(
                self._chunks.put_neighbours(txn, preparation, chunk_id, found)
                for chunk_id, found in neighbours.items()
            )

        return self._env.update(body)

    def get_neighbours(
        self, preparation: str, chunk_ids: Iterable[ChunkId]
    ) -> dict[ChunkId, tuple[Neighbour, ...]]:
        """What chunks are prepared behind, where it is recorded; all as of one moment."""
        with self._env.read() as txn:
            found = {c: self._chunks.neighbours(txn, preparation, c) for c in chunk_ids}
        return {chunk_id: neighbours for chunk_id, neighbours in found.items() if neighbours}

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
        encoded = {chunk_id: encode_vector(vector) for chunk_id, vector in vectors.items()}

        def body(txn: Transaction) -> int:
            num_kept = 0
            for chunk_id, data in encoded.items():
                if self._chunks.contains(txn, chunk_id):
                    put_vector(txn, self.namespace, chunk_id, embedder_digest, data)
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
                vector = get_vector(txn, self.namespace, chunk_id, embedder_digest)
                if vector is not None:
                    vectors[chunk_id] = vector
        return vectors

    def _write(
        self, txn: Transaction, document: Document, old: InfoRecord | None, now: float
    ) -> PutResult:
        old_size = self._counters.size_of(txn, old) if old else DocumentSize()
        new_ids = {chunk.chunk_id for chunk in document.chunks}
        old_ids = set(self._chunk_ids(txn, old)) if old else set()
        self._chunks.hold(txn, new_ids - old_ids)
        removed = self._chunks.release(txn, old_ids - new_ids)
        version = old.version + (old.digest != document.digest) if old else 1
        stored = replace(
            document,
            version=version,
            created_at=old.created_at if old else now,
            updated_at=now,
        )
        document_id = document.document_id
        info = info_record(stored, old)
        txn.put(
            Database.DOCUMENTS,
            info_key(self.namespace, document_id),
            encode_record(info),
        )
        txn.put(
            Database.DOCUMENTS,
            text_key(self.namespace, document_id),
            encode_record(text_record(stored)),
        )
        remove_expiry(txn, self.namespace, old.expires_at if old else None, document_id)
        put_expiry(txn, self.namespace, stored.expires_at, document_id)
        self._counters.count(txn, 0 if old else 1, self._counters.size_of(txn, info) - old_size)
        return PutResult("updated" if old else "created", stored, removed)

    def _remove(self, txn: Transaction, info: InfoRecord) -> Removed:
        size = self._counters.size_of(txn, info)
        removed = self._chunks.release(txn, self._chunk_ids(txn, info))
        txn.delete(Database.DOCUMENTS, info_key(self.namespace, info.document_id))
        txn.delete(Database.DOCUMENTS, text_key(self.namespace, info.document_id))
        remove_expiry(txn, self.namespace, info.expires_at, info.document_id)
        self._counters.count(txn, -1, DocumentSize() - size)
        return removed

    def _info(self, txn: Transaction, document_id: str) -> InfoRecord | None:
        key = info_key(self.namespace, document_id)
        return read_record(txn, Database.DOCUMENTS, key, InfoRecord, f"document {document_id!r}")

    def _document(self, txn: Transaction, info: InfoRecord) -> Document:
        return build_document(info, self._text(txn, info, TextRecord))

    def _chunk_ids(self, txn: Transaction, info: InfoRecord) -> Sequence[ChunkId]:
        return [ChunkId(c.chunk_id) for c in self._text(txn, info, ChunkIdsRecord).chunks]

    def _sound_chunk_ids(self, txn: Transaction, info: InfoRecord) -> Sequence[ChunkId]:
        data = txn.get(Database.DOCUMENTS, text_key(self.namespace, info.document_id))
        record = None if data is None else decoded(data, ChunkIdsRecord)
        return [ChunkId(c.chunk_id) for c in record.chunks] if record else ()

    def _text(self, txn: Transaction, info: InfoRecord, kind: type[RecordT]) -> RecordT:
        key, what = text_key(self.namespace, info.document_id), f"document {info.document_id!r}"
        record = read_record(txn, Database.DOCUMENTS, key, kind, what)
        if record is None:
            raise StoreFormatError(f"{what} is damaged (its text is missing)")
        return record
