"""Keeps indexes in step with a tenant's catalog. Knows when, not what is searched for.

They are derived: built from the catalog, with generations compared before each use. The index of
words, where one is wanted, holds the same chunks as the vectors do, as of the same generation.
Vectors are kept in the store, so that a restart embeds nothing again. A chunk's vectors, one per
window, lie behind one another in one stored row ``[windows * dim]``; a chunk without a token has
an empty one. They are stored under :func:`vectors_digest`, so vectors of another embedder are
never read, whatever their width, and need no migration.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from chunkcache.catalog import Catalog
from chunkcache.documents import Document
from chunkcache.errors import StoreFullError, StoreReadOnlyError
from chunkcache.identity import ChunkId, digest_fields
from chunkcache_retriever.embedder import WINDOWS_VERSION, Embedder, Vectors, embed_all
from chunkcache_retriever.index import ChunkIndex, vector_fault
from chunkcache_retriever.word_index import WordIndex

Location = tuple[str, int]
"""A document id and a chunk's index in that document."""

OnEmbedded = Callable[[int, int], None]
"""Told how many chunks without a vector have been looked at, and how many there are."""

NO_TEXT = "no text to embed"

_BATCH_CHUNKS = 64


@dataclass(frozen=True)
class SyncReport:
    """What bringing the index up to date took.

    Attributes:
        generation: The catalog's generation that it is up to date with.
        num_chunks: Distinct chunks of all documents.
        num_vectors: Vectors in the index.
        num_loaded: Chunks whose vectors came from the store.
        num_embedded: Chunks that were embedded.
        num_removed: Chunks that went.
        num_unsaved: Chunks whose vectors found no room in the store: a restart embeds them again.
        not_indexed: Chunks that cannot be found, with the reason.
    """

    generation: int
    num_chunks: int = 0
    num_vectors: int = 0
    num_loaded: int = 0
    num_embedded: int = 0
    num_removed: int = 0
    num_unsaved: int = 0
    not_indexed: Mapping[ChunkId, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CatalogView:
    """Where chunks are, as of one generation.

    Attributes:
        report: What the last change took.
        locations: Every place of each chunk, in order of document ids and indexes.
    """

    report: SyncReport
    locations: Mapping[ChunkId, Sequence[Location]]


class CatalogIndex:
    """An index of every chunk of a catalog. Safe to use from several threads.

    Args:
        catalog: The tenant's documents.
        embedder: Makes the vectors.
        on_embedded: Told during a long change how far it is.
        words: An empty index to keep beside the vectors, if words are searched too.
        factory: Which FAISS index holds the vectors; None chooses by their number.

    Raises:
        InvalidValueError: There is no such index.

    Attributes:
        index: The vectors.
        words: The words, if wanted.
    """

    def __init__(
        self,
        catalog: Catalog,
        embedder: Embedder,
        on_embedded: OnEmbedded = lambda num_done, num_chunks: None,
        words: WordIndex | None = None,
        factory: str | None = None,
    ) -> None:
        self.index = ChunkIndex(embedder.dim, factory)
        self.words = words
        self._catalog = catalog
        self._embedder = embedder
        self._on_embedded = on_embedded
        self._vectors_digest = vectors_digest(embedder)
        self._lock = threading.Lock()
        self._view = CatalogView(SyncReport(generation=0), {})

    def sync(self) -> CatalogView:
        """Bring the index up to date with every change that was finished before the call.

        A change meanwhile may be seen in part; the next call sees the rest.

        Raises:
            ModelError: The embedder does not do what it says.
            StoreError: The store cannot be read.
        """
        # Before the lock is waited for: after a fork it may be held for ever, and this raises.
        view, generation = self._view, self._catalog.generation()
        if view.report.generation == generation:
            return view
        with self._lock:
            # Read before the chunks are, so that a change meanwhile leaves a difference.
            generation = self._catalog.generation()
            if self._view.report.generation != generation:
                self._view = self._updated(generation)
            return self._view

    def _updated(self, generation: int) -> CatalogView:
        locations: dict[ChunkId, list[Location]] = {}
        for chunk_id, document_id, index in self._catalog.chunks():
            locations.setdefault(chunk_id, []).append((document_id, index))
        known = self._view.report.not_indexed
        not_indexed = {c: reason for c, reason in known.items() if c in locations}
        gone = self.index.chunk_ids() - locations.keys()
        new = [c for c in locations if c not in self.index and c not in not_indexed]
        vectors: dict[ChunkId, Vectors] = {}
        texts: dict[ChunkId, str] = {}
        documents: dict[str, Document] = {}
        num_loaded = num_embedded = num_unsaved = 0
        for start in range(0, len(new), _BATCH_CHUNKS):
            batch = new[start : start + _BATCH_CHUNKS]
            loaded = self._load(batch)
            unread = batch if self.words is not None else [c for c in batch if c not in loaded]
            places = {c: locations[c][0] for c in unread}
            documents = self._documents(
                {document_id for document_id, _ in places.values()}, documents
            )
            read = _texts(places, documents)
            embedded = self._embed({c: text for c, text in read.items() if c not in loaded})
            if self.words is not None:
                # One that went meanwhile has a vector to load, and nothing to be found by.
                loaded = {c: rows for c, rows in loaded.items() if c in read}
                texts |= read
            num_unsaved += self._save(embedded)
            vectors |= loaded | embedded
            num_loaded += len(loaded)
            num_embedded += len(embedded)
            self._on_embedded(start + len(batch), len(new))
        not_indexed |= {c: NO_TEXT for c, rows in vectors.items() if not len(rows)}
        not_indexed |= self.index.update(
            {c: rows for c, rows in vectors.items() if len(rows)}, remove=gone
        )
        if self.words is not None and (new or gone):
            held = {c: text for c, text in texts.items() if c in self.index}
            self.words.update(held, remove=gone)
        report = SyncReport(
            generation=generation,
            num_chunks=len(locations),
            num_vectors=self.index.num_vectors,
            num_loaded=num_loaded,
            num_embedded=num_embedded,
            num_removed=len(gone),
            num_unsaved=num_unsaved,
            not_indexed=not_indexed,
        )
        return CatalogView(report, locations)

    def _load(self, chunk_ids: Iterable[ChunkId]) -> dict[ChunkId, Vectors]:
        stored = self._catalog.get_vectors(self._vectors_digest, chunk_ids)
        return {c: row.reshape(-1, self._embedder.dim) for c, row in stored.items()}

    def _documents(
        self, wanted: Collection[str], held: Mapping[str, Document]
    ) -> dict[str, Document]:
        """Documents, those of the batch before among them: a long one is read once."""
        kept = {name: held[name] for name in wanted if name in held}
        return kept | self._catalog.get_many([name for name in wanted if name not in held])

    def _embed(self, texts: Mapping[ChunkId, str]) -> dict[ChunkId, Vectors]:
        return dict(zip(texts, embed_all(self._embedder, list(texts.values())), strict=True))

    def _save(self, vectors: Mapping[ChunkId, Vectors]) -> int:
        """Keep sound vectors in the store.

        Returns:
            How many chunks were not kept: a store that is full, or open for reading alone, must
            not end searching in it.
        """
        sound = {c: rows.ravel() for c, rows in vectors.items() if vector_fault(rows) is None}
        if not sound:
            return 0
        try:
            self._catalog.put_vectors(self._vectors_digest, sound)
        except (StoreFullError, StoreReadOnlyError):
            return len(sound)
        return 0


def _texts(
    places: Mapping[ChunkId, Location], documents: Mapping[str, Document]
) -> dict[ChunkId, str]:
    """Chunks' texts; one that is not in its place any more is left to the next sync."""
    texts: dict[ChunkId, str] = {}
    for chunk_id, (document_id, index) in places.items():
        document = documents.get(document_id)
        chunks = document.chunks if document else ()
        if document and index < len(chunks) and chunks[index].chunk_id == chunk_id:
            texts[chunk_id] = document.chunk_text(chunks[index])
    return texts


def vectors_digest(embedder: Embedder) -> bytes:
    """Names all that stored vectors depend on: the embedder, and how a text is cut for it."""
    return digest_fields(
        "chunk vectors",
        [
            ("embedder", embedder.digest),
            ("dim", embedder.dim),
            ("max_tokens", embedder.max_tokens),
            ("windows", WINDOWS_VERSION),
        ],
    )
