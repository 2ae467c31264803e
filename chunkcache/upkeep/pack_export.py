"""``export``: a tenant's documents, chunks and entries of one model, as a corpus pack."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save_file

from chunkcache.catalog import Catalog
from chunkcache.catalog_neighbours import BEHIND, NeighboursRecord
from chunkcache.catalog_records import (
    ChunkRecord,
    InfoRecord,
    chunk_key,
    encode_metadata,
    info_prefix,
    read_record,
)
from chunkcache.documents import Document
from chunkcache.errors import InvalidValueError
from chunkcache.identity import (
    ENTRY_FORMAT_VERSION,
    ChunkKey,
    TenantNamespace,
    TokenizerDigest,
    encode_token_ids,
)
from chunkcache.store.entry_format import (
    PRODUCER,
    DamagedEntryError,
    decode_entry,
    decode_header,
    encode_entry,
)
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.records import decode_record, decoded, encode_record
from chunkcache.store.transaction import Database, Transaction
from chunkcache.upkeep.findings import OnProgress
from chunkcache.upkeep.new_directory import appearing_whole
from chunkcache.upkeep.pack_format import (
    MANIFEST_NAME,
    PACK_FORMAT,
    PACK_KIND,
    PACK_NAMESPACE,
    SHARD_BYTES,
    PackChunk,
    PackDocument,
    PackManifest,
    PackNeighbours,
    document_name,
    entry_name,
    shard_name,
)

_PAGE_DOCUMENTS = 1_000


@dataclass(frozen=True)
class ExportReport:
    """What a pack holds.

    Attributes:
        manifest: What it says about itself.
        num_bytes: Bytes of its files.
        skipped_documents: Documents that another tokenizer cut; they are not in it.
        damaged_entries: Entries that cannot be read; they are not in it.
    """

    manifest: PackManifest
    num_bytes: int
    skipped_documents: int
    damaged_entries: int


def export_pack(
    env: StoreEnvironment,
    namespace: TenantNamespace,
    target: Path,
    *,
    model: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_progress: OnProgress = lambda what, done, total: None,
) -> ExportReport:
    """Write a pack into a new directory; it appears there once it is whole.

    Each document is as of one moment; others may change other documents meanwhile.

    Args:
        env: The store.
        namespace: Whose documents.
        target: The new directory.
        model: Whose entries: the model's digest in hex, or its beginning. None is the only one.
        shard_bytes: When to begin another file.
        on_progress: Told how far it is.

    Raises:
        InvalidValueError: There are no entries, or those of several models and none is named.
        StoreError: ``target`` is there already or cannot be written, or the store cannot be read.
        StoreFullError: The disk has no room; nothing is left of the pack.
        StoreFormatError: A document is damaged, and would be missing in the pack.
    """
    catalog = Catalog(env, namespace)
    _check_records(env, namespace)
    digest = _model(env, namespace, model)
    tokenizer = _tokenizer(env, catalog, digest)
    num_skipped = 0
    with appearing_whole(target) as partial:
        partial.mkdir(mode=0o700, parents=True)
        writer = _Writer(env, namespace, digest, partial, shard_bytes)
        total = catalog.count()
        for number, document in enumerate(_documents(catalog)):
            on_progress("documents", number, total)
            if document.tokenizer == tokenizer:
                writer.add(document)
            else:
                num_skipped += 1
        writer.close_shard()
        manifest = PackManifest(
            kind=PACK_KIND,
            format=PACK_FORMAT,
            producer=PRODUCER,
            created_at=time.time(),
            entry_format=ENTRY_FORMAT_VERSION,
            model=digest.hex(),
            tokenizer=tokenizer.hex(),
            documents=writer.num_documents,
            entries=len(writer.exported),
            shards=writer.num_shards,
        )
        (partial / MANIFEST_NAME).write_bytes(
            msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"
        )
        num_bytes = sum(path.stat().st_size for path in partial.iterdir())
    return ExportReport(manifest, num_bytes, num_skipped, writer.num_damaged)


class _Writer:
    """Collects tensors, and writes a file whenever there are enough."""

    def __init__(
        self,
        env: StoreEnvironment,
        namespace: TenantNamespace,
        model: bytes,
        directory: Path,
        shard_bytes: int,
    ) -> None:
        self._env = env
        self._namespace = namespace
        self._model = model
        self._directory = directory
        self._shard_bytes = shard_bytes
        self._tensors: dict[str, np.ndarray] = {}
        self.num_documents = self.num_shards = self.num_damaged = 0
        self.exported: set[ChunkKey] = set()

    def add(self, document: Document) -> None:
        number = self.num_documents
        self.num_documents += 1
        with self._env.read() as txn:
            neighbours = [*self._neighbours(txn, document)]
            keys = self._entry_keys(txn, document)
        record = PackDocument(
            document_id=document.document_id,
            text=document.text,
            metadata=encode_metadata(document.metadata),
            chunking=document.chunking,
            chunks=[
                PackChunk(c.start, c.end, encode_token_ids(c.token_ids)) for c in document.chunks
            ],
            neighbours=neighbours,
            expires_at=document.expires_at,
        )
        self._put(document_name(number), np.frombuffer(encode_record(record), np.uint8))
        for index, key in enumerate(keys):
            self._add_entry(number, index, key)

    def close_shard(self) -> None:
        if self._tensors:
            save_file(self._tensors, self._directory / shard_name(self.num_shards))
            self.num_shards += 1
            self._tensors = {}

    def _put(self, name: str, data: np.ndarray) -> None:
        self._tensors[name] = data
        if sum(t.nbytes for t in self._tensors.values()) >= self._shard_bytes:
            self.close_shard()

    def _add_entry(self, number: int, index: int, key: ChunkKey) -> None:
        """Add an entry under the pack's namespace; one that is gone or damaged is left out."""
        try:
            with self._env.read() as txn:
                value = txn.get(Database.ENTRIES, key)
                if value is None:
                    return
                header = decode_header(value)
                if header.model != self._model:
                    return
                entry = decode_entry(value, header.identity())
        except DamagedEntryError:
            self.num_damaged += 1
            return
        identity = replace(entry.identity, namespace=PACK_NAMESPACE)
        data = encode_entry(replace(entry, identity=identity, key=identity.key()))
        is_behind = identity.preparation.startswith("neighbours")
        self._put(entry_name(number, index, is_behind=is_behind), np.frombuffer(data, np.uint8))
        self.exported.add(key)

    def _entry_keys(self, txn: Transaction, document: Document) -> list[ChunkKey]:
        """Entries of a document's chunks that came with no earlier document."""
        keys: dict[ChunkKey, None] = {}
        for chunk in document.chunks:
            own = chunk_key(self._namespace, chunk.chunk_id)
            record = read_record(txn, Database.CHUNKS, own, ChunkRecord, "a chunk")
            ids = encode_token_ids(chunk.token_ids)
            for key in map(ChunkKey, record.entry_keys if record else ()):
                if key not in self.exported and _token_ids(txn, key) in (None, ids):
                    keys[key] = None
        return list(keys)

    def _neighbours(self, txn: Transaction, document: Document) -> Iterator[PackNeighbours]:
        for index, chunk in enumerate(document.chunks):
            prefix = chunk_key(self._namespace, chunk.chunk_id) + BEHIND
            for key, data in txn.scan(Database.CHUNKS, prefix):
                record = decoded(data, NeighboursRecord)
                if record is not None:
                    name = key[len(prefix) :].decode()
                    yield PackNeighbours(index, name, [n.token_ids for n in record.neighbours])


def _token_ids(txn: Transaction, key: ChunkKey) -> bytes | None:
    """The tokens of an entry; None for one that cannot be read, which is counted later."""
    value = txn.get(Database.ENTRIES, key)
    try:
        return None if value is None else decode_header(value).token_ids
    except DamagedEntryError:
        return None


def _check_records(env: StoreEnvironment, namespace: TenantNamespace) -> None:
    """Refuse what a listing would leave out without a word."""
    with env.read() as txn:
        for _, data in txn.scan(Database.DOCUMENTS, info_prefix(namespace)):
            decode_record(data, InfoRecord, "a document, which 'chunkcache store verify' names,")


def _documents(catalog: Catalog) -> Iterator[Document]:
    page = catalog.list(limit=_PAGE_DOCUMENTS)
    while page:
        for info in page:
            document = catalog.get(info.document_id)
            if document is not None:
                yield document
        page = catalog.list(after=page[-1].document_id, limit=_PAGE_DOCUMENTS)


def _model(env: StoreEnvironment, namespace: TenantNamespace, wanted: str | None) -> bytes:
    """The digest of the model whose entries are exported."""
    found: Counter[bytes] = Counter()
    with env.read() as txn:
        for _, value in txn.scan(Database.ENTRIES):
            try:
                header = decode_header(value)
            except DamagedEntryError:
                continue
            if header.namespace == namespace:
                found[header.model] += 1
    if not found:
        raise InvalidValueError("the store holds no entries to export; pre-cache first")
    chosen = [m for m in sorted(found) if m.hex().startswith((wanted or "").lower())]
    if len(chosen) != 1:
        held = ", ".join(f"{m.hex()} ({found[m]:,} entries)" for m in sorted(found))
        raise InvalidValueError(f"name one of these models: {held}", param="model_digest")
    return chosen[0]


def _tokenizer(env: StoreEnvironment, catalog: Catalog, model: bytes) -> TokenizerDigest:
    """The tokenizer that cut the chunks of a model's entries."""
    for document in _documents(catalog):
        with env.read() as txn:
            for chunk in document.chunks:
                own = chunk_key(catalog.namespace, chunk.chunk_id)
                record = read_record(txn, Database.CHUNKS, own, ChunkRecord, "a chunk")
                for key in record.entry_keys if record else ():
                    value = txn.get(Database.ENTRIES, key)
                    if value is not None and _has_model(value, model):
                        return document.tokenizer
    raise InvalidValueError("no document has entries of that model", param="model_digest")


def _has_model(value: memoryview, model: bytes) -> bool:
    try:
        return decode_header(value).model == model
    except DamagedEntryError:
        return False
