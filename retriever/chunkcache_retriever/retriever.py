"""From a question to the chunks that may hold its answer."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from chunkcache.catalog import Catalog
from chunkcache.catalog_values import DocumentInfo
from chunkcache.documents import Document, Metadata, canonical_text
from chunkcache.errors import EmptyDocumentError, InvalidValueError
from chunkcache.identity import ChunkId
from chunkcache.planning import DocumentRef
from chunkcache_retriever.catalog_index import (
    CatalogIndex,
    CatalogView,
    Location,
    OnEmbedded,
    SyncReport,
)
from chunkcache_retriever.embedder import Embedder
from chunkcache_retriever.index import ScoredChunk
from chunkcache_retriever.metadata_filter import MetadataFilter
from chunkcache_retriever.ranking import ChunkRanker, RankingKind, SearchedQuery
from chunkcache_retriever.rerank.apply import reranked
from chunkcache_retriever.rerank.reranker import DEFAULT_DEPTH, Reranker
from chunkcache_retriever.word_index import WordIndex

MAX_TOP_K = 1_000

_MAX_ATTEMPTS = 3
_PAGE_DOCUMENTS = 1_000


class CatalogOwner(Protocol):
    """What a retriever needs of a :class:`~chunkcache.chunk_cache.ChunkCache`."""

    @property
    def catalog(self) -> Catalog:
        """The tenant's documents."""
        ...


@dataclass(frozen=True)
class ChunkHit:
    """A passage that a search found.

    Attributes:
        chunk_id: Its chunk.
        document_id: A document that holds it.
        chunk_index: Which of that document's chunks it is.
        score: The more, the better; how it is made is the ranking's matter (see
            :data:`~chunkcache_retriever.ranking.RankingKind`).
        text: The passage: ``[start, end)`` of the document's text.
        start: First character.
        end: One past the last character.
        metadata: The document's.
        also_in: Other places of the same passage: document id and chunk index.
    """

    chunk_id: ChunkId
    document_id: str
    chunk_index: int
    score: float
    text: str
    start: int
    end: int
    metadata: Metadata = field(default_factory=dict)
    also_in: tuple[Location, ...] = ()


class Retriever:
    """Searches one tenant's documents by meaning and words. Safe to use from several threads.

    The first search after a change of the documents embeds what is new; call :meth:`sync` after
    storing many documents, and no search has to wait for that. A forked child needs a retriever
    of its own, over a store that it opened itself; this one raises a ``StoreError`` there.

    Args:
        cache: Whose documents are searched.
        embedder: Embeds chunks and questions.
        ranking: What passages are ranked by: both meaning and words, or one of them.
        on_embedded: Told during a long change of the index how far it is.
        index_factory: Which FAISS index holds the vectors (docs/retrieval.md); None chooses by their
            number.
        reranker: Scores the best passages again, each with the question; None leaves their order.
        rerank_depth: How many of them.

    Raises:
        InvalidValueError: There is no such ranking, or no such index.
    """

    def __init__(
        self,
        cache: CatalogOwner,
        embedder: Embedder,
        ranking: RankingKind = "hybrid",
        on_embedded: OnEmbedded = lambda num_done, num_chunks: None,
        *,
        index_factory: str | None = None,
        reranker: Reranker | None = None,
        rerank_depth: int = DEFAULT_DEPTH,
    ) -> None:
        self._catalog = cache.catalog
        words = None if ranking == "dense" else WordIndex()
        self._index = CatalogIndex(cache.catalog, embedder, on_embedded, words, index_factory)
        self._reranker = reranker
        self._rerank_depth = rerank_depth
        self._ranker = ChunkRanker(embedder, self._index.index, words, ranking)

    def sync(self) -> SyncReport:
        """Bring the index up to date with the documents.

        Returns:
            What the last change took; the same report as before if there was none since.

        Raises:
            ModelError: The embedder does not do what it says.
            StoreError: The store cannot be read.
        """
        return self._index.sync().report

    def search(
        self,
        query: str,
        top_k: int = 5,
        filters: MetadataFilter | None = None,
        among: Collection[str] | None = None,
    ) -> list[ChunkHit]:
        """The nearest passages, the best first.

        Passages that differ in white space alone are one passage. What was deleted or replaced
        before the call is never found.

        Args:
            query: The question, of any length.
            top_k: At most so many passages, 1 to 1000.
            filters: Only passages of documents whose metadata match.
            among: Only passages of these documents.

        Raises:
            InvalidValueError: The query holds no text, or ``top_k`` is out of range.
            ModelError: The embedder does not do what it says.
            StoreError: The store cannot be read.
            ChunkCacheError: The reranker failed.
        """
        _check_top_k(top_k)
        num_wanted = top_k if self._reranker is None else max(top_k, self._rerank_depth)
        text = _checked_query(query)
        # The fork check: an embedder's locks and threads would hang where the store says why.
        self._catalog.generation()
        searched = self._ranker.prepare(text)
        hits: list[ChunkHit] = []
        for _ in range(_MAX_ATTEMPTS):
            view = self._index.sync()
            wanted = self._wanted(filters, among)
            hits, is_current = self._passages(view, searched, num_wanted, wanted)
            if is_current:
                break
        if self._reranker is not None:
            hits = reranked(self._catalog, self._reranker, text, hits)
        return hits[:top_k]

    def retrieve(
        self, query: str, top_k: int = 5, filters: MetadataFilter | None = None
    ) -> tuple[DocumentRef, ...]:
        """The nearest passages as parts of documents, ready for a prompt.

        Returns:
            One reference per document, in order of each document's best passage; its chunks in
            the document's order.

        Raises:
            ChunkCacheError: As for :meth:`search`.
        """
        indexes: dict[str, list[int]] = {}
        for hit in self.search(query, top_k, filters):
            indexes.setdefault(hit.document_id, []).append(hit.chunk_index)
        return tuple(DocumentRef(d, tuple(sorted(found))) for d, found in indexes.items())

    def _wanted(
        self, filters: MetadataFilter | None, among: Collection[str] | None
    ) -> frozenset[str] | None:
        """Documents that may be found; None where all may."""
        if filters is None:
            return None if among is None else frozenset(among)
        matching = (
            info.document_id
            for info in _all_documents(self._catalog)
            if filters.matches(info.metadata)
        )
        return frozenset(d for d in matching if among is None or d in among)

    def _passages(
        self,
        view: CatalogView,
        query: SearchedQuery,
        top_k: int,
        wanted: frozenset[str] | None,
    ) -> tuple[list[ChunkHit], bool]:
        """Distinct passages, and whether the documents still were as the view says."""
        locations = view.locations
        if wanted is not None:
            kept = ((c, [p for p in at if p[0] in wanted]) for c, at in locations.items())
            locations = {chunk_id: places for chunk_id, places in kept if places}
        among = None if wanted is None else locations.keys()
        num_asked = top_k
        while True:
            found = self._ranker.rank(query, num_asked, among)
            hits, is_current = self._resolve(locations, found)
            passages = _distinct(hits)
            if len(passages) >= top_k or len(found) < num_asked or not is_current:
                return passages[:top_k], is_current
            num_asked *= 2

    def _resolve(
        self, locations: Mapping[ChunkId, Sequence[Location]], found: Sequence[ScoredChunk]
    ) -> tuple[list[ChunkHit], bool]:
        """Look chunks up in the documents as they are now; what is not there is left out."""
        places = {s.chunk_id: locations.get(s.chunk_id, ()) for s in found}
        documents = self._catalog.get_many({p[0][0] for p in places.values() if p})
        hits = [
            hit
            for scored in found
            if (hit := _hit(scored, places[scored.chunk_id], documents)) is not None
        ]
        return hits, len(hits) == len(found)


def _all_documents(catalog: Catalog) -> Iterator[DocumentInfo]:
    after: str | None = None
    while page := catalog.list(after=after, limit=_PAGE_DOCUMENTS):
        yield from page
        after = page[-1].document_id


def _hit(
    scored: ScoredChunk, places: Sequence[Location], documents: dict[str, Document]
) -> ChunkHit | None:
    if not places:
        return None
    document_id, index = places[0]
    document = documents.get(document_id)
    if document is None or index >= len(document.chunks):
        return None
    chunk = document.chunks[index]
    if chunk.chunk_id != scored.chunk_id:
        return None
    return ChunkHit(
        chunk_id=scored.chunk_id,
        document_id=document_id,
        chunk_index=index,
        score=scored.score,
        text=document.chunk_text(chunk),
        start=chunk.start,
        end=chunk.end,
        metadata=document.metadata,
        also_in=tuple(places[1:]),
    )


def _distinct(hits: Sequence[ChunkHit]) -> list[ChunkHit]:
    """Join hits whose texts differ in white space alone under the best of them."""
    best: dict[str, ChunkHit] = {}
    for hit in hits:
        words = " ".join(hit.text.split())
        first = best.setdefault(words, hit)
        if first is not hit:
            others = (*first.also_in, (hit.document_id, hit.chunk_index), *hit.also_in)
            best[words] = replace(first, also_in=others)
    return list(best.values())


def _check_top_k(top_k: int) -> None:
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= MAX_TOP_K:
        raise InvalidValueError(f"top_k is {top_k!r}, not 1 to {MAX_TOP_K}", param="top_k")


def _checked_query(query: str) -> str:
    try:
        return canonical_text(query, param="query")
    except EmptyDocumentError as error:
        raise InvalidValueError("the query is empty", param="query") from error
