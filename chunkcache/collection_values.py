"""Named sets of documents as values, and how one is kept."""

from dataclasses import dataclass

from blake3 import blake3

from chunkcache.catalog_values import DocumentInfo
from chunkcache.documents import Metadata
from chunkcache.identity import TenantNamespace
from chunkcache.store.records import Record


class CollectionRecord(Record, frozen=True, kw_only=True):
    """A set, without its documents."""

    collection_id: str
    name: str
    description: str
    metadata: bytes
    created_at: float


@dataclass(frozen=True)
class Collection:
    """A set of documents.

    Attributes:
        collection_id: Server-made id.
        name: What people call it; may be empty.
        description: What it is for; may be empty.
        metadata: A JSON object, returned as given.
        created_at: Unix seconds.
    """

    collection_id: str
    name: str
    description: str
    metadata: Metadata
    created_at: float


@dataclass(frozen=True)
class CollectionSize:
    """What is in a set.

    Attributes:
        num_documents: Its documents.
        num_bytes: Bytes of their texts.
    """

    num_documents: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class Member:
    """A document in a set.

    Attributes:
        document: The document.
        added_at: Since when it is in the set, Unix seconds.
        attributes: What is said of it there, a JSON object.
    """

    document: DocumentInfo
    added_at: float
    attributes: Metadata


def collection_prefix(namespace: TenantNamespace) -> bytes:
    """What the keys of a namespace's sets begin with."""
    return namespace + b"L"


def collection_key(namespace: TenantNamespace, collection_id: str) -> bytes:
    """Key of a :class:`CollectionRecord`."""
    return collection_prefix(namespace) + blake3(collection_id.encode("utf-8")).digest()
