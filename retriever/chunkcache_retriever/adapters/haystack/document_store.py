"""A Haystack document store and retriever over a cache. Haystack's ``DocumentWriter`` writes to it."""

from typing import Any

from haystack import Document, component, default_from_dict, default_to_dict
from haystack.document_stores.errors import DuplicateDocumentError
from haystack.document_stores.types import DuplicatePolicy
from haystack.utils.filters import document_matches_filter

from chunkcache.errors import InvalidValueError
from chunkcache_retriever.adapters.client import DEFAULT_TOP_K, CacheClient, Passage
from chunkcache_retriever.adapters.haystack.filters import translated
from chunkcache_retriever.adapters.haystack.serialisation import client_from_dict, client_to_dict
from chunkcache_retriever.adapters.passages import place_metadata


class ChunkCacheDocumentStore:
    """Documents whose keys and values are cached; writing one prefills it.

    A document's id in Haystack is its id in the store. Text and metadata are kept, in JSON's terms;
    an embedding is not, since the cache makes its own.

    Args:
        client: The cache.
    """

    def __init__(self, client: CacheClient) -> None:
        self.client = client

    def to_dict(self) -> dict[str, Any]:
        """The store in a serialised pipeline.

        Raises:
            InvalidValueError: Its cache is of this process.
        """
        return default_to_dict(self, client=client_to_dict(self.client))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ChunkCacheDocumentStore":
        """The store that :meth:`to_dict` wrote."""
        parameters = data.get("init_parameters", {})
        client = client_from_dict(parameters.get("client"))
        return default_from_dict(cls, data | {"init_parameters": {"client": client}})

    def count_documents(self) -> int:
        """Documents of the store."""
        return sum(1 for _ in self.client.document_ids())

    def filter_documents(self, filters: dict[str, Any] | None = None) -> list[Document]:
        """Whole documents that match Haystack's filters; reads every document of the store."""
        found = [d for i in self.client.document_ids() if (d := self._document(i)) is not None]
        return [d for d in found if not filters or document_matches_filter(filters, d)]

    def write_documents(
        self, documents: list[Document], policy: DuplicatePolicy = DuplicatePolicy.NONE
    ) -> int:
        """Store documents; each is cached when this returns. Without a policy, they are replaced.

        Returns:
            How many were written.

        Raises:
            ValueError: Something is not a document.
            DuplicateDocumentError: By the policy ``FAIL``; nothing was written.
            InvalidValueError: A document has no text; nothing was written.
            ChunkCacheError: The store or the server fails; what was written before stays.
        """
        if not isinstance(documents, list) or any(not isinstance(d, Document) for d in documents):
            raise ValueError("write_documents takes a list of documents")
        for document in documents:
            if document.content is None:
                raise InvalidValueError(f"document {document.id!r} has no text", param="documents")
        if policy == DuplicatePolicy.FAIL:
            self._check_new(documents)
        num_written = 0
        for document in documents:
            if policy == DuplicatePolicy.SKIP and self.client.get(document.id) is not None:
                continue
            self.client.put(document.id, document.content or "", document.meta)
            num_written += 1
        return num_written

    def delete_documents(self, document_ids: list[str]) -> None:
        """Remove documents from every tier; ids that are not there are passed over."""
        for identifier in document_ids:
            self.client.delete(identifier)

    def _check_new(self, documents: list[Document]) -> None:
        seen: set[str] = set()
        for document in documents:
            if document.id in seen or self.client.get(document.id) is not None:
                raise DuplicateDocumentError(f"there is a document {document.id!r} already")
            seen.add(document.id)

    def _document(self, identifier: str) -> Document | None:
        found = self.client.get(identifier)
        if found is None:
            return None
        return Document(id=found.document_id, content=found.text, meta=dict(found.metadata))


@component
class ChunkCacheRetriever:
    """Finds passages of the stored documents by meaning and words.

    A passage is named as by Haystack's splitter: ``meta`` has the document's id as ``source_id``,
    and ``split_id`` and ``split_idx_start``. Its place under ``chunkcache`` makes answers hit by id.

    Args:
        document_store: Whose documents are searched.
        top_k: At most so many passages.
        filters: Haystack's, on metadata.
    """

    def __init__(
        self,
        document_store: ChunkCacheDocumentStore,
        top_k: int = DEFAULT_TOP_K,
        filters: dict[str, Any] | None = None,
    ) -> None:
        self.document_store = document_store
        self.top_k = top_k
        self.filters = filters

    def to_dict(self) -> dict[str, Any]:
        """The component in a serialised pipeline."""
        return default_to_dict(
            self,
            document_store=self.document_store.to_dict(),
            top_k=self.top_k,
            filters=self.filters,
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ChunkCacheRetriever":
        """The component that :meth:`to_dict` wrote."""
        parameters = dict(data.get("init_parameters", {}))
        store = ChunkCacheDocumentStore.from_dict(parameters.pop("document_store"))
        return default_from_dict(
            cls, data | {"init_parameters": {**parameters, "document_store": store}}
        )

    @component.output_types(documents=list[Document])
    def run(
        self, query: str, top_k: int | None = None, filters: dict[str, Any] | None = None
    ) -> dict[str, list[Document]]:
        """Passages, the best first.

        Raises:
            FilterError: The filter cannot be searched by.
            ChunkCacheError: The search fails.
        """
        wanted = self.filters if filters is None else filters
        found = self.document_store.client.search(
            query, self.top_k if top_k is None else top_k, translated(wanted) if wanted else None
        )
        return {"documents": [_passage(p) for p in found]}


def _passage(passage: Passage) -> Document:
    split = {
        "source_id": passage.document_id,
        "split_id": passage.chunk_index,
        "split_idx_start": passage.start,
    }
    return Document(
        id=f"{passage.document_id}#{passage.chunk_index}",
        content=passage.text,
        meta={**place_metadata(passage), **split},
        score=passage.score,
    )
