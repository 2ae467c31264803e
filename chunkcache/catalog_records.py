"""The catalog's records and keys: how a document is laid out in the store.

::

    documents   namespace  C                          CounterRecord
                namespace  I  id prefix  id digest    InfoRecord, in order of ids
                namespace  T  id digest               TextRecord
                namespace  L  collection id digest    CollectionRecord; see collection_values
    chunks      namespace  chunk id                   ChunkRecord
    vectors     namespace  chunk id  embedder digest  VectorRecord

What a chunk is prepared behind lies beside its record; see ``catalog_neighbours``. When documents
expire is noted beside them; see ``catalog_expiry``.

Every key begins with the tenant's namespace. Ids are hashed into keys, so their length never
matters; the prefix of the id keeps a listing in order.
"""

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import cast

import msgspec
from blake3 import blake3

from chunkcache.catalog_values import DocumentInfo
from chunkcache.documents import Chunk, Document, Metadata, UploadedFile
from chunkcache.identity import (
    DIGEST_BYTES,
    ChunkId,
    TenantNamespace,
    TokenizerDigest,
    decode_token_ids,
    encode_token_ids,
)
from chunkcache.quota import DocumentSize
from chunkcache.store.records import Record, RecordT, decode_record, decoded
from chunkcache.store.transaction import Database, Transaction

ID_PREFIX_BYTES = 256


class CounterRecord(Record, frozen=True, kw_only=True):
    """Numbers of one namespace.

    Attributes:
        generation: Changes so far.
        num_documents: Documents now.
        num_tokens: Their tokens.
        record_bytes: Bytes of their records.
    """

    generation: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    record_bytes: int = 0

    @property
    def size(self) -> DocumentSize:
        """What the documents take."""
        return DocumentSize(self.num_tokens, self.record_bytes)


class FileNames(msgspec.Struct, array_like=True, frozen=True):
    """What a client said of the file that a document came in."""

    filename: str
    purpose: str


class Membership(msgspec.Struct, array_like=True, frozen=True):
    """That a document is in a collection.

    Attributes:
        collection_id: Which.
        added_at: Since when, Unix seconds.
        attributes: What is said of the document there, a JSON object.
    """

    collection_id: str
    added_at: float
    attributes: bytes


class InfoRecord(Record, frozen=True, kw_only=True):
    """A document without its text."""

    document_id: str
    version: int
    digest: bytes
    num_tokens: int
    num_chunks: int
    num_chars: int
    metadata: bytes
    tokenizer: bytes
    chunking: str
    created_at: float
    updated_at: float
    expires_at: float | None = None
    num_bytes: int = 0
    file: FileNames | None = None
    memberships: tuple[Membership, ...] = ()

    def is_expired(self, now: float) -> bool:
        """Whether the document is to be treated as if it were not there."""
        return self.expires_at is not None and self.expires_at <= now


class ChunkSpan(msgspec.Struct, array_like=True, frozen=True):
    """A chunk as part of its document."""

    chunk_id: bytes
    start: int
    end: int
    token_ids: bytes


class TextRecord(Record, frozen=True, kw_only=True):
    """A document's text and how it was cut."""

    text: str
    chunks: list[ChunkSpan]


class ChunkIdOnly(msgspec.Struct, array_like=True, frozen=True):
    """The part of a :class:`ChunkSpan` that an index needs."""

    chunk_id: bytes


class ChunkIdsRecord(Record, frozen=True, kw_only=True):
    """The part of a :class:`TextRecord` that an index needs; the text is not decoded."""

    chunks: list[ChunkIdOnly]


class ChunkRecord(Record, frozen=True, kw_only=True):
    """A chunk, whichever documents it is part of.

    Attributes:
        num_documents: Documents that hold it, each counted once.
        entry_keys: Entries to remove with it.
    """

    num_documents: int
    entry_keys: tuple[bytes, ...] = ()


class VectorRecord(Record, frozen=True, kw_only=True):
    """An embedding: little-endian float32."""

    data: bytes


def read_record(
    txn: Transaction, database: Database, key: bytes, kind: type[RecordT], what: str
) -> RecordT | None:
    """The record under a key, if there is one.

    Raises:
        StoreFormatError: It is damaged, or of another format.
    """
    data = txn.get(database, key)
    return None if data is None else decode_record(data, kind, what)


def document_digest(document_id: str) -> bytes:
    """What stands for an id in keys, 32 bytes."""
    return blake3(document_id.encode("utf-8")).digest()


def counter_key(namespace: TenantNamespace) -> bytes:
    """Key of a namespace's numbers."""
    return namespace + b"C"


def info_prefix(namespace: TenantNamespace) -> bytes:
    """What the info keys of a namespace begin with."""
    return namespace + b"I"


def info_sort_key(namespace: TenantNamespace, document_id: str) -> bytes:
    """What all ids with the same beginning share; UTF-8 sorts as code points do."""
    return info_prefix(namespace) + document_id.encode("utf-8")[:ID_PREFIX_BYTES] + b"\x00"


def info_key(namespace: TenantNamespace, document_id: str) -> bytes:
    """Key of a document's :class:`InfoRecord`."""
    return info_sort_key(namespace, document_id) + document_digest(document_id)


def text_key(namespace: TenantNamespace, document_id: str) -> bytes:
    """Key of a document's :class:`TextRecord`."""
    return namespace + b"T" + document_digest(document_id)


def scan_infos(
    txn: Transaction, namespace: TenantNamespace, after: str | None = None
) -> Iterator[InfoRecord]:
    """Info records in order of ids, behind ``after``; damaged ones are left out."""
    prefix = info_prefix(namespace)
    start = prefix if after is None else info_sort_key(namespace, after)
    sort_key_of = itemgetter(slice(None, -DIGEST_BYTES))
    items = txn.scan(Database.DOCUMENTS, prefix, start=start)
    # Ids that share a long beginning lie together, in order of their digests.
    for _, group in groupby(items, key=lambda item: sort_key_of(item[0])):
        found = (decoded(data, InfoRecord) for _, data in group)
        infos = [info for info in found if info is not None]
        for info in sorted(infos, key=lambda info: info.document_id):
            if after is None or info.document_id > after:
                yield info


def chunk_key(namespace: TenantNamespace, chunk_id: ChunkId) -> bytes:
    """Key of a :class:`ChunkRecord`, and the beginning of its vectors' keys."""
    return namespace + chunk_id


def encode_metadata(metadata: Metadata) -> bytes:
    """Metadata as JSON; equal objects give equal bytes."""
    return msgspec.json.encode(dict(metadata), order="sorted")


def info_record(document: Document, old: InfoRecord | None) -> InfoRecord:
    """A document's record without its text.

    Args:
        document: The document.
        old: The record of the version before it: what was uploaded as which file, and belongs to
            which collections, still does.
    """
    given = document.file
    kept = None if old is None else old.file
    return InfoRecord(
        document_id=document.document_id,
        version=document.version,
        digest=document.digest,
        num_tokens=document.num_tokens,
        num_chunks=len(document.chunks),
        num_chars=len(document.text),
        metadata=encode_metadata(document.metadata),
        tokenizer=document.tokenizer,
        chunking=document.chunking,
        created_at=document.created_at,
        updated_at=document.updated_at,
        expires_at=document.expires_at,
        num_bytes=len(document.text.encode("utf-8")),
        file=kept if given is None else FileNames(given.filename, given.purpose),
        memberships=() if old is None else old.memberships,
    )


def is_record_of(info: InfoRecord, document: Document) -> bool:
    """Whether a document is the stored one: same text, metadata and expiry, cut the same way."""
    return (info.digest, info.metadata, info.tokenizer, info.chunking, info.expires_at) == (
        document.digest,
        encode_metadata(document.metadata),
        document.tokenizer,
        document.chunking,
        document.expires_at,
    )


def document_info(info: InfoRecord) -> DocumentInfo:
    """A record as callers see it."""
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
        expires_at=info.expires_at,
        num_bytes=info.num_bytes,
        file=uploaded_file(info),
        collections=collection_ids(info),
    )


def uploaded_file(info: InfoRecord) -> UploadedFile | None:
    """The file that a document came in, if it came in one."""
    return None if info.file is None else UploadedFile(info.file.filename, info.file.purpose)


def collection_ids(info: InfoRecord) -> tuple[str, ...]:
    """The collections that a document is in."""
    return tuple(m.collection_id for m in info.memberships)


def text_record(document: Document) -> TextRecord:
    """A document's text and cuts."""
    return TextRecord(
        text=document.text,
        chunks=[
            ChunkSpan(c.chunk_id, c.start, c.end, encode_token_ids(c.token_ids))
            for c in document.chunks
        ],
    )


def decode_metadata(data: bytes) -> Metadata:
    """Invert :func:`encode_metadata`."""
    return cast(Metadata, msgspec.json.decode(data))


def build_document(info: InfoRecord, text: TextRecord) -> Document:
    """Invert :func:`info_record` and :func:`text_record`."""
    return Document(
        document_id=info.document_id,
        text=text.text,
        metadata=decode_metadata(info.metadata),
        chunks=tuple(
            Chunk(ChunkId(c.chunk_id), c.start, c.end, decode_token_ids(c.token_ids))
            for c in text.chunks
        ),
        tokenizer=TokenizerDigest(info.tokenizer),
        chunking=info.chunking,
        version=info.version,
        created_at=info.created_at,
        updated_at=info.updated_at,
        expires_at=info.expires_at,
        file=uploaded_file(info),
        collections=collection_ids(info),
    )
