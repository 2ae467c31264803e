"""What the catalog returns, as values."""

from dataclasses import dataclass
from typing import Literal

from chunkcache.documents import Document, Metadata, UploadedFile
from chunkcache.identity import ChunkId, ChunkKey


@dataclass(frozen=True)
class DocumentInfo:
    """A document without its text; fields as in :class:`chunkcache.documents.Document`.

    Attributes:
        digest: BLAKE3 of the text, in hex.
        num_bytes: Bytes of the text in UTF-8.
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
    expires_at: float | None = None
    num_bytes: int = 0
    file: UploadedFile | None = None
    collections: tuple[str, ...] = ()


@dataclass(frozen=True)
class Neighbour:
    """A chunk that another one is prepared behind.

    Attributes:
        chunk_id: The chunk.
        token_ids: Its tokens.
    """

    chunk_id: ChunkId
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Removed:
    """What went with chunks.

    Attributes:
        chunk_ids: Chunks that no document of the tenant holds any more.
        entry_keys: Their entries, and those prepared behind them: gone from disk; the caller drops
            copies in RAM.
        unprepared_chunk_ids: Chunks that stay, and had been prepared behind one that went: what they
            are prepared behind is not recorded any more.
    """

    chunk_ids: tuple[ChunkId, ...] = ()
    entry_keys: tuple[ChunkKey, ...] = ()
    unprepared_chunk_ids: tuple[ChunkId, ...] = ()


@dataclass(frozen=True)
class PutResult:
    """What ``Catalog.put`` did.

    Attributes:
        status: ``created``, ``updated``, or ``unchanged``.
        document: The document as stored, with its version and times.
        removed: What went with chunks that it had before.
        refused_entry_keys: Entries with values that are not finite; they were left out.
    """

    status: Literal["created", "unchanged", "updated"]
    document: Document
    removed: Removed = Removed()
    refused_entry_keys: tuple[ChunkKey, ...] = ()


@dataclass(frozen=True)
class DeleteResult:
    """What ``Catalog.delete`` did.

    Attributes:
        existed: Whether there was such a document; one that had expired was not there any more.
        removed: What went with its chunks.
    """

    existed: bool
    removed: Removed = Removed()
