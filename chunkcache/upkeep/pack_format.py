"""The form of a corpus pack: what its files are called, hold and may hold at most.

::

    PACK/manifest.json          PackManifest
    PACK/000000.safetensors     uint8 tensors, in shards of bounded size
        00000000.document       PackDocument, as a record with a checksum
        00000000.entry.00000    an entry's stored bytes, with checksums of their own
        00000000.behind.00000   one that was prepared behind its neighbours

Entries carry a namespace of their own (:data:`PACK_NAMESPACE`): a pack says nothing of the store or
tenant that it came from. A pack holds no path, and no name in it becomes one.
"""

import re
from typing import Final

import msgspec

from chunkcache.identity import TenantNamespace
from chunkcache.store.records import Record

PACK_FORMAT: Final = 1
PACK_KIND: Final = "chunkcache-pack"
MANIFEST_NAME: Final = "manifest.json"
PACK_NAMESPACE: Final = TenantNamespace(b"\0" * 32)

SHARD_BYTES: Final = 128 << 20
"""A shard is closed once it holds so much; a single tensor may be larger."""
MAX_MANIFEST_BYTES: Final = 64 << 10
MAX_SHARDS: Final = 1_000_000
MAX_SHARD_HEADER_BYTES: Final = 16 << 20
MAX_DOCUMENT_BYTES: Final = 256 << 20

NAME: Final = re.compile(r"(\d{8})\.(document|entry\.\d{5}|behind\.\d{5})")


class PackManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a pack says about itself.

    Attributes:
        kind: :data:`PACK_KIND`.
        format: :data:`PACK_FORMAT`.
        producer: Version of chunkcache that made it.
        created_at: Unix seconds.
        entry_format: Format of its entries.
        model: Digest of the model that computed them, in hex.
        tokenizer: Digest of the tokenizer that cut its documents, in hex.
        documents: Documents in it.
        entries: Entries in it.
        shards: Files in it, the manifest apart.
    """

    kind: str
    format: int
    producer: str
    created_at: float
    entry_format: int
    model: str
    tokenizer: str
    documents: int
    entries: int
    shards: int


class PackChunk(msgspec.Struct, array_like=True, frozen=True):
    """A chunk: where it lies in the text, and its token ids (encoded)."""

    start: int
    end: int
    token_ids: bytes


class PackNeighbours(msgspec.Struct, array_like=True, frozen=True):
    """What a chunk is prepared behind: the chunk's place, the preparation, token ids in order."""

    chunk: int
    preparation: str
    token_ids: list[bytes]


class PackDocument(Record, frozen=True, kw_only=True):
    """A document without anything that its store alone knows."""

    document_id: str
    text: str
    metadata: bytes
    chunking: str
    chunks: list[PackChunk]
    neighbours: list[PackNeighbours]
    expires_at: float | None = None


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"{number:06}.safetensors"


def document_name(number: int) -> str:
    """Tensor name of a document."""
    return f"{number:08}.document"


def entry_name(number: int, index: int, *, is_behind: bool) -> str:
    """Tensor name of an entry that comes with a document."""
    return f"{number:08}.{'behind' if is_behind else 'entry'}.{index:05}"
