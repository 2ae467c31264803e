"""``import``: a corpus pack's documents and entries into a store, one transaction per document.

A pack is not trusted. Everything that can be compared is: digests, checksums, sizes, the tokens of
every chunk with its text, the geometry of every entry with the model. That the numbers of an entry
are what the model would compute is the one thing that is taken on the word of whoever made it.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from chunkcache.catalog import Catalog
from chunkcache.catalog_records import decode_metadata
from chunkcache.catalog_values import Neighbour, PutResult
from chunkcache.documents import Chunk, Document, canonical_text
from chunkcache.entry import Entry
from chunkcache.errors import ChunkCacheError, InvalidValueError, PackError
from chunkcache.fusion.preparation import Preparation
from chunkcache.identity import ChunkId, EntryIdentity, chunk_id, decode_token_ids
from chunkcache.runtime import Runtime
from chunkcache.store.disk import put_entry
from chunkcache.store.entry_format import DamagedEntryError, decode_entry, decode_header
from chunkcache.store.transaction import Database, Transaction
from chunkcache.upkeep.findings import OnProgress
from chunkcache.upkeep.pack_format import PACK_NAMESPACE, PackDocument
from chunkcache.upkeep.pack_reader import PackReader

MAX_CHUNKING_CHARS = 200
Recorded = dict[tuple[str, ChunkId], tuple[Neighbour, ...]]
"""By preparation and chunk, what the store has on record that the chunk is prepared behind."""


@dataclass(frozen=True)
class ImportReport:
    """What came of an import.

    Attributes:
        documents: Documents looked at.
        created: New ones.
        updated: Those that replaced a document of the same id.
        unchanged: Those that were there already.
        expired: Those that have expired, and were left out.
        entries: Entries that were stored.
        present_entries: Entries that were there already.
        left_out_entries: Entries prepared behind chunks other than those on record here.
        interrupted: Whether it was stopped; running it again goes on.
    """

    documents: int
    created: int
    updated: int
    unchanged: int
    expired: int
    entries: int
    present_entries: int
    left_out_entries: int
    interrupted: bool


def import_pack(
    runtime: Runtime,
    catalog: Catalog,
    source: Path,
    *,
    on_progress: OnProgress = lambda what, done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> ImportReport:
    """Import a pack. Doing it again changes nothing; one that was interrupted goes on.

    A document replaces one of the same id, as a put does. Entries prepared behind neighbours follow
    once every document is there.

    Args:
        runtime: The store, and the model that the entries must be of.
        catalog: The tenant who gets the documents.
        source: The pack's directory.
        on_progress: Told how far it is.
        should_stop: Asked before each document.

    Raises:
        ForeignPackError: The pack is of another model, tokenizer or format; nothing was imported.
        PackError: Something in it is not as it must be; what was imported before that stays.
        StoreFullError: No room; what was imported stays.
        StoreReadOnlyError: The store was opened for reading alone.
    """
    pack = PackReader(source)
    pack.check_fits(runtime.model.runner.digest, runtime.model.tokenizer.digest)
    run = _Import(runtime, catalog, pack)
    num_documents = pack.manifest.documents
    for what, step in (("documents", run.document), ("neighbours", run.behind)):
        for number in range(num_documents):
            if should_stop():
                return run.report(interrupted=True)
            on_progress(what, number, num_documents)
            step(number)
    return run.report(interrupted=False)


class _Import:
    """One import's counts, and how one document comes in."""

    def __init__(self, runtime: Runtime, catalog: Catalog, pack: PackReader) -> None:
        self._runtime = runtime
        self._catalog = catalog
        self._pack = pack
        self._tokenizer = runtime.model.tokenizer
        self._counts: Counter[str] = Counter()
        self._seen: set[str] = set()

    def report(self, *, interrupted: bool) -> ImportReport:
        counts = self._counts
        return ImportReport(
            documents=counts["documents"],
            created=counts["created"],
            updated=counts["updated"],
            unchanged=counts["unchanged"],
            expired=counts["expired"],
            entries=counts["entries"],
            present_entries=counts["present"],
            left_out_entries=counts["left out"],
            interrupted=interrupted,
        )

    def document(self, number: int) -> None:
        """Store a document with those of its entries that hold a trace of itself alone."""
        packed = self._pack.document(number)
        document = self._checked(number, packed)
        if document.document_id in self._seen:
            raise PackError(f"the pack holds document {document.document_id!r} twice")
        self._seen.add(document.document_id)
        self._counts["documents"] += 1
        now = time.time()
        if document.expires_at is not None and document.expires_at <= now:
            self._counts["expired"] += 1
            return
        names = self._pack.entry_names(number, are_behind=False)

        def body(txn: Transaction) -> tuple[PutResult, Counter[str]]:
            result = self._catalog.put_in(txn, document, now=now)
            return result, self._put_entries(txn, document, names, {})

        result, counts = self._runtime.env.update(body)
        self._runtime.follow_removals()
        self._counts += counts
        self._counts[result.status] += 1

    def behind(self, number: int) -> None:
        """Record a document's neighbours, and store the entries that were prepared behind them."""
        packed = self._pack.document(number)
        names = self._pack.entry_names(number, are_behind=True)
        if not packed.neighbours and not names:
            return
        document = self._checked(number, packed)
        stored = self._catalog.get(document.document_id)
        if stored is None or stored.digest != document.digest:
            return
        recorded: Recorded = {}
        for item in packed.neighbours:
            if not 0 <= item.chunk < len(document.chunks) or not item.token_ids:
                raise PackError(f"document {number} of the pack has neighbours of no chunk")
            _check_preparation(item.preparation, is_behind=True)
            owner = document.chunks[item.chunk].chunk_id
            wanted = [self._neighbour(t) for t in item.token_ids]
            self._catalog.put_neighbours(item.preparation, {owner: wanted})
            found = self._catalog.get_neighbours(item.preparation, [owner]).get(owner)
            if found is not None and found == tuple(wanted):
                recorded[item.preparation, owner] = found
        self._counts += self._runtime.env.update(
            lambda txn: self._put_entries(txn, document, names, recorded)
        )

    def _put_entries(
        self, txn: Transaction, document: Document, names: Iterable[str], recorded: Recorded
    ) -> Counter[str]:
        counts: Counter[str] = Counter()
        owners = {c.token_ids: c.chunk_id for c in document.chunks}
        for name in names:
            value = self._pack.entry(name)
            packed_identity, identity = self._identity(name, value, owners, recorded)
            if identity is None:
                counts["left out"] += 1
                continue
            key = identity.key()
            traced = (owners[identity.token_ids], *identity.behind)
            if not self._catalog.link_entry_in(txn, key, traced):
                counts["left out"] += 1
            elif txn.get(Database.ENTRIES, key) is not None:
                counts["present"] += 1
            else:
                put_entry(txn, self._entry(name, value, packed_identity, identity))
                counts["entries"] += 1
        return counts

    def _identity(
        self,
        name: str,
        value: memoryview,
        owners: dict[tuple[int, ...], ChunkId],
        recorded: Recorded,
    ) -> tuple[EntryIdentity, EntryIdentity | None]:
        """An entry's identity in the pack, and the one that it gets here, if it may come in."""
        try:
            packed = decode_header(value).identity()
        except (DamagedEntryError, InvalidValueError) as error:
            raise PackError(f"{name} of the pack is damaged: {error}") from error
        if packed.namespace != PACK_NAMESPACE or packed.model != self._runtime.model.runner.digest:
            raise PackError(f"{name} of the pack is of another model or namespace")
        owner = owners.get(packed.token_ids)
        if owner is None:
            raise PackError(f"{name} of the pack belongs to no chunk of its document")
        is_behind = ".behind." in name
        _check_preparation(packed.preparation, is_behind=is_behind)
        behind: tuple[ChunkId, ...] = ()
        if is_behind:
            neighbours = recorded.get((packed.preparation, owner))
            if neighbours is None:
                return packed, None
            behind = tuple(n.chunk_id for n in neighbours)
        identity = replace(packed, namespace=self._catalog.namespace, behind=behind)
        return packed, identity

    def _entry(
        self, name: str, value: memoryview, packed: EntryIdentity, identity: EntryIdentity
    ) -> Entry:
        try:
            entry = decode_entry(value, packed)
        except DamagedEntryError as error:
            raise PackError(f"{name} of the pack is damaged: {error}") from error
        spec = self._runtime.model.runner.spec
        shape = entry.shape
        if (shape.num_layers, shape.num_kv_heads, shape.head_dim) != (
            spec.num_layers,
            spec.num_kv_heads,
            spec.head_dim,
        ):
            raise PackError(f"{name} of the pack has the shape {shape}, which is not the model's")
        if not entry.is_finite():
            raise PackError(f"{name} of the pack holds values that are not finite")
        return replace(entry, identity=identity, key=identity.key())

    def _checked(self, number: int, packed: PackDocument) -> Document:
        """A document of the pack as a value, once everything about it agrees."""
        try:
            chunks = tuple(self._chunk(packed, i) for i in range(len(packed.chunks)))
            document = Document(
                document_id=packed.document_id,
                text=packed.text,
                metadata=decode_metadata(packed.metadata),
                chunks=chunks,
                tokenizer=self._tokenizer.digest,
                chunking=packed.chunking,
                expires_at=packed.expires_at,
            )
            if canonical_text(packed.text) != packed.text:
                raise InvalidValueError("its text is not canonical")
            if len(packed.chunking) > MAX_CHUNKING_CHARS:
                raise InvalidValueError("its splitter has no such name")
            self._check_cuts(document)
        except (ChunkCacheError, msgspec.MsgspecError, RecursionError) as error:
            raise PackError(f"document {number} of the pack is not acceptable: {error}") from error
        return document

    def _chunk(self, packed: PackDocument, index: int) -> Chunk:
        span = packed.chunks[index]
        token_ids = decode_token_ids(span.token_ids)
        identifier = chunk_id(self._catalog.namespace, self._tokenizer.digest, token_ids)
        return Chunk(identifier, span.start, span.end, token_ids)

    def _check_cuts(self, document: Document) -> None:
        """Chunks are what the tokenizer makes of their text, and nothing between them is left out."""
        end = 0
        encode = self._tokenizer.encode_content
        for chunk in document.chunks:
            if chunk.start < end or chunk.end > len(document.text):
                raise InvalidValueError("its chunks overlap, or lie outside its text")
            if chunk.start > end and encode(document.text[end : chunk.start]):
                raise InvalidValueError("its chunks leave out some of its text")
            if tuple(encode(document.chunk_text(chunk))) != chunk.token_ids:
                raise InvalidValueError("a chunk's tokens are not those of its text")
            end = chunk.end
        if encode(document.text[end:]):
            raise InvalidValueError("its chunks leave out some of its text")

    def _neighbour(self, encoded: bytes) -> Neighbour:
        try:
            token_ids = decode_token_ids(encoded)
        except InvalidValueError as error:
            raise PackError("a neighbour's tokens in the pack are damaged") from error
        identifier = chunk_id(self._catalog.namespace, self._tokenizer.digest, token_ids)
        return Neighbour(identifier, token_ids)


def _check_preparation(text: str, *, is_behind: bool) -> None:
    try:
        kind = Preparation.parse(text).kind
    except ChunkCacheError as error:
        raise PackError(f"the pack holds entries of preparation {text[:80]!r}") from error
    if (kind == "neighbours") != is_behind:
        raise PackError(f"the pack holds an entry of preparation {text!r} under another's name")
