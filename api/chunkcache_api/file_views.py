"""Documents as OpenAI's files, and as files of a vector store: what a view says, and no store."""

from collections.abc import Iterator
from typing import Any, Final

from chunkcache.catalog import Catalog
from chunkcache.catalog_values import DocumentInfo
from chunkcache.collection_values import Collection, CollectionSize, Member
from chunkcache.documents import Document, Metadata, UploadedFile

DEFAULT_PURPOSE: Final = "user_data"
"""Of a document that was stored as one, not uploaded as a file."""

_PAGE_DOCUMENTS: Final = 1_000


def file_body(document: DocumentInfo | Document) -> dict[str, Any]:
    """A document as a file: its id is the file's, its text the content."""
    file = file_of(document)
    is_info = isinstance(document, DocumentInfo)
    expires_at = document.expires_at
    return {
        "id": document.document_id,
        "object": "file",
        "bytes": document.num_bytes if is_info else len(document.text.encode("utf-8")),
        "created_at": int(document.created_at),
        "expires_at": None if expires_at is None else int(expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def file_of(document: DocumentInfo | Document) -> UploadedFile:
    """What the client said of the file; the document's id is its name where it said nothing."""
    return document.file or UploadedFile(shown_name(document.document_id), DEFAULT_PURPOSE)


def shown_name(document_id: str) -> str:
    """An id as a file's name: cut short, and without what is not printed."""
    printed = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in document_id)
    return printed[:512]


def all_documents(catalog: Catalog) -> Iterator[DocumentInfo]:
    """Every document, read in pages, so that a slow caller holds nothing open."""
    after: str | None = None
    while page := catalog.list(after=after, limit=_PAGE_DOCUMENTS):
        yield from page
        after = page[-1].document_id


def vector_store_body(collection: Collection, size: CollectionSize) -> dict[str, Any]:
    """A collection as a vector store. What is in it is ready: there are no other files."""
    num_files = size.num_documents
    return {
        "id": collection.collection_id,
        "object": "vector_store",
        "created_at": int(collection.created_at),
        "name": collection.name,
        "description": collection.description or None,
        "usage_bytes": size.num_bytes,
        "file_counts": {
            "in_progress": 0,
            "completed": num_files,
            "failed": 0,
            "cancelled": 0,
            "total": num_files,
        },
        "status": "completed",
        "expires_after": None,
        "expires_at": None,
        "last_active_at": int(collection.created_at),
        "metadata": dict(collection.metadata),
    }


def member_body(collection_id: str, member: Member, chunk_tokens: int) -> dict[str, Any]:
    """A document of a collection as a vector store's file.

    Args:
        collection_id: The collection.
        member: The document there.
        chunk_tokens: Largest size of a chunk.
    """
    return {
        "id": member.document.document_id,
        "object": "vector_store.file",
        "created_at": int(member.added_at),
        "vector_store_id": collection_id,
        "usage_bytes": member.document.num_bytes,
        "status": "completed",
        "last_error": None,
        "attributes": dict(member.attributes),
        "chunking_strategy": {
            "type": "static",
            "static": {"max_chunk_size_tokens": chunk_tokens, "chunk_overlap_tokens": 0},
        },
    }


def searched_metadata(member: Member) -> Metadata:
    """What filters of a vector store see: the document's metadata, and its attributes there."""
    return {**member.document.metadata, **member.attributes}
