"""What the catalog returns, as values."""

from dataclasses import dataclass
from typing import Literal

from chunkcache.documents import Document, Metadata
from chunkcache.identity import ChunkId, ChunkKey


@dataclass(frozen=True)
class DocumentInfo:
    """A document without its text; fields as in :class:`chunkcache.documents.Document`.

    Attributes:
        digest: BLAKE3 of the text, in hex.
    """

    document_id: str
    version: int
    digest: str
    num_tokens: int
    num_chunks: int
    num_chars: int
    metadata: Metadata
    created_at: float
    updated_at: float


@dataclass(frozen=True)
class PutResult:
    """What ``Catalog.put`` did.

    Attributes:
        status: ``created``, ``updated``, or ``unchanged``.
        document: The document as stored, with its version and times.
        removed_chunk_ids: Chunks that no document of the tenant holds any more.
        removed_entry_keys: Their entries, gone from disk; the caller drops copies in RAM.
        refused_entry_keys: Entries with values that are not finite; they were left out.
    """

    status: Literal["created", "unchanged", "updated"]
    document: Document
    removed_chunk_ids: tuple[ChunkId, ...] = ()
    removed_entry_keys: tuple[ChunkKey, ...] = ()
    refused_entry_keys: tuple[ChunkKey, ...] = ()


@dataclass(frozen=True)
class DeleteResult:
    """What ``Catalog.delete`` did.

    Attributes:
        existed: Whether there was such a document.
        removed_chunk_ids: Chunks that no document of the tenant holds any more.
        removed_entry_keys: Their entries, gone from disk; the caller drops copies in RAM.
    """

    existed: bool
    removed_chunk_ids: tuple[ChunkId, ...] = ()
    removed_entry_keys: tuple[ChunkKey, ...] = ()
