"""Documents in: text to a stored document, and a stored document to entries.

The two halves stand apart because neighbours are looked for among documents that are stored
already. Knows neither corpora nor how neighbours are found.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass

from chunkcache.catalog import Catalog
from chunkcache.catalog_records import encode_metadata
from chunkcache.catalog_values import PutResult
from chunkcache.documents import (
    Document,
    Metadata,
    UploadedFile,
    canonical_text,
    check_document_id,
    check_metadata,
)
from chunkcache.entry_naming import EntryNames
from chunkcache.errors import StoreError, StoreFullError
from chunkcache.identity import EntryIdentity
from chunkcache.results import IngestResult
from chunkcache.runtime import Runtime
from chunkcache.splitting import TextFormat, format_of_fingerprint
from chunkcache.store.tier import NotStored

OnPrefill = Callable[[int, int], None]
"""Told of each chunk that was computed: its tokens, and the rows run for them."""


@dataclass(frozen=True)
class PrefillCounts:
    """What one document's entries took.

    Attributes:
        chunks: Distinct chunks.
        prefilled_chunks: Those that were run through the model.
        prefilled_tokens: Their tokens.
        prefill_rows: Rows run for them, those of prefixes included.
        refused_chunks: Those whose keys or values were not finite.
        not_kept_chunks: Those that the budget on disk has no room for; most were not computed.
        without_neighbours: Those that no neighbours stand behind though the preparation wants some.
    """

    chunks: int
    prefilled_chunks: int
    prefilled_tokens: int
    prefill_rows: int
    refused_chunks: int
    not_kept_chunks: int
    without_neighbours: int


class DocumentIngest:
    """Stores one tenant's documents and computes their entries. Safe to use from several threads.

    Args:
        runtime: Model, store and engine.
        catalog: The tenant's documents.
        names: Which entries chunks want.
        system_ids: Tokens of the system prompt whose opening chunks are prefilled behind.
    """

    def __init__(
        self, runtime: Runtime, catalog: Catalog, names: EntryNames, system_ids: tuple[int, ...]
    ) -> None:
        self.runtime = runtime
        self.catalog = catalog
        self.names = names
        self.system_ids = system_ids

    def ingest(
        self,
        document_id: str,
        text: str,
        metadata: Metadata,
        text_format: TextFormat,
        expires_at: float | None = None,
        file: UploadedFile | None = None,
    ) -> IngestResult:
        """Store a document and compute its entries. Errors as in ``ChunkCache.put``."""
        stored = self.store(document_id, text, metadata, text_format, expires_at, file)
        with self.runtime.disk.sparing():
            counts = self.prefill(stored.document)
        return IngestResult(
            status=stored.status,
            document_id=document_id,
            version=stored.document.version,
            digest=stored.document.digest.hex(),
            num_tokens=stored.document.num_tokens,
            num_chunks=len(stored.document.chunks),
            prefilled_chunks=counts.prefilled_chunks,
            prefilled_tokens=counts.prefilled_tokens,
            reused_chunks=counts.chunks - counts.prefilled_chunks - counts.not_kept_chunks,
            refused_chunks=counts.refused_chunks,
            not_kept_chunks=counts.not_kept_chunks,
            unprepared_chunks=len(stored.removed.unprepared_chunk_ids),
        )

    def store(
        self,
        document_id: str,
        text: str,
        metadata: Metadata,
        text_format: TextFormat,
        expires_at: float | None = None,
        file: UploadedFile | None = None,
    ) -> PutResult:
        """Cut a document and store it, without any model work."""
        text = canonical_text(text)
        runtime = self.runtime
        known = self._stored_alike(document_id, text, metadata, text_format, expires_at, file)
        if known is not None:
            return PutResult("unchanged", known)
        document = Document(
            document_id=document_id,
            text=text,
            metadata=metadata,
            chunks=runtime.splitter.split(text, self.catalog.namespace, text_format),
            tokenizer=runtime.model.tokenizer.digest,
            chunking=runtime.splitter.fingerprint(text_format),
            expires_at=expires_at,
            file=file,
        )
        stored = self.catalog.put(document, now=time.time())
        runtime.follow_removals()
        return stored

    def store_again(self, document_id: str) -> PutResult:
        """A stored document as it is, or cut again where another tokenizer had cut it.

        Raises:
            DocumentNotFoundError: There is none of that id.
            StoreReadOnlyError: It has to be cut again, in a store that is open for reading alone.
        """
        document = self.catalog.require(document_id)
        if document.tokenizer == self.runtime.model.tokenizer.digest:
            return PutResult("unchanged", document)
        return self.store(
            document_id,
            document.text,
            document.metadata,
            format_of_fingerprint(document.chunking),
            document.expires_at,
        )

    def _stored_alike(
        self,
        document_id: str,
        text: str,
        metadata: Metadata,
        text_format: TextFormat,
        expires_at: float | None,
        file: UploadedFile | None,
    ) -> Document | None:
        """The stored document, if putting this one would change nothing: it need not be cut for that."""
        runtime = self.runtime
        check_document_id(document_id)
        stored = self.catalog.get(document_id)
        if (
            stored is None
            or runtime.env.read_only
            or stored.text != text
            or stored.tokenizer != runtime.model.tokenizer.digest
            or stored.chunking != runtime.splitter.fingerprint(text_format)
            or stored.expires_at != expires_at
            or file not in (None, stored.file)
        ):
            return None
        check_metadata(metadata)
        return stored if encode_metadata(stored.metadata) == encode_metadata(metadata) else None

    def prefill(
        self,
        document: Document,
        on_prefill: OnPrefill = lambda num_tokens, num_rows: None,
    ) -> PrefillCounts:
        """Compute the entries of a stored document that are not there yet.

        Args:
            document: The document.
            on_prefill: Told of each chunk that was computed, on the caller's thread.

        Raises:
            StoreFullError: No room; the chunks that have no entry are computed when they are
                asked for.
            StoreError: The store failed.
        """
        runtime = self.runtime
        distinct = list(dict.fromkeys(c.token_ids for c in document.chunks))
        identities = self.names.identities(distinct, self.system_ids)
        num_chunks = num_tokens = num_rows = num_refused = num_not_kept = 0

        # All of them before anything is computed, which might go in their place.
        missing: list[EntryIdentity] = []
        for identity in identities:
            if runtime.stack.contains(identity.key()):
                runtime.disk.spare(identity.key())
            else:
                missing.append(identity)

        # Many at once while there is room; then one by one, since each may be the last that fits.
        crowded: list[EntryIdentity] = []

        def fitting() -> Iterator[EntryIdentity]:
            for identity in missing:
                if runtime.disk.has_room(identity, runtime.entry_bytes(identity)):
                    yield identity
                else:
                    crowded.append(identity)

        def each() -> Generator["_Ensured", None, None]:
            nonlocal num_not_kept
            with closing(runtime.window.each(fitting(), self._ensure)) as ensured:
                yield from ensured
            for identity in crowded:
                if runtime.disk.would_keep(identity, runtime.entry_bytes(identity)):
                    yield self._ensure(identity)
                else:
                    num_not_kept += 1

        with closing(each()) as ensured_entries:
            for ensured in ensured_entries:
                _check_stored(document.document_id, ensured.warning)
                num_refused += ensured.warning == NotStored.NON_FINITE
                num_not_kept += ensured.warning == NotStored.OVER_BUDGET
                if ensured.num_rows:
                    num_chunks += 1
                    num_tokens += ensured.num_tokens
                    num_rows += ensured.num_rows
                    on_prefill(ensured.num_tokens, ensured.num_rows)
        return PrefillCounts(
            chunks=len(distinct),
            prefilled_chunks=num_chunks,
            prefilled_tokens=num_tokens,
            prefill_rows=num_rows,
            refused_chunks=num_refused,
            not_kept_chunks=num_not_kept,
            without_neighbours=sum(i.preparation != str(runtime.preparation) for i in identities),
        )

    def _ensure(self, identity: EntryIdentity) -> "_Ensured":
        rows_run: list[int] = []
        with self.runtime.ensure_entry(identity, rows_run.append) as lease:
            return _Ensured(len(identity.token_ids), sum(rows_run), lease.warning)


@dataclass(frozen=True)
class _Ensured:
    """An entry that is there now: rows run for it, none if it was; why it was not kept."""

    num_tokens: int
    num_rows: int
    warning: NotStored | None


def _check_stored(document_id: str, warning: NotStored | None) -> None:
    """Raise what kept an entry from being stored, where trying another chunk would not help."""
    if warning == NotStored.STORE_FULL:
        raise StoreFullError(f"the store is full: not every chunk of {document_id!r} is cached")
    if warning == NotStored.STORE_ERROR:
        raise StoreError(f"the store failed: not every chunk of {document_id!r} is cached")
