"""LangChain's retriever and document index over a cache.

An id of the framework is the id of the store: what adding gives, deleting takes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import structlog
from blake3 import blake3
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.indexing.base import DeleteResponse, DocumentIndex, UpsertResponse
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict

from chunkcache.errors import InvalidValueError
from chunkcache_retriever.adapters.client import DEFAULT_TOP_K, CacheClient, Passage
from chunkcache_retriever.adapters.passages import place_metadata

_log = structlog.get_logger("chunkcache.langchain")


class ChunkCacheRetriever(BaseRetriever):
    """Finds passages of the stored documents by meaning and words.

    A passage's ``id`` is its document's; its metadata are the document's, and its place under
    ``chunkcache``.

    Attributes:
        client: The cache that is searched.
        k: At most so many passages.
        filters: Only passages of documents whose metadata match (docs/retrieval.md).
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    client: CacheClient
    k: int = DEFAULT_TOP_K
    filters: dict[str, Any] | None = None

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        k: int | None = None,
        filters: dict[str, Any] | None = None,
    ) -> list[Document]:
        top_k = self.k if k is None else k
        wanted = self.filters if filters is None else filters
        return [_document(p) for p in self.client.search(query, top_k, wanted)]


class ChunkCacheDocumentIndex(DocumentIndex):
    """Writes documents to a cache, which prefills them; and finds them again.

    Works with ``langchain_core.indexing.index``. A document without an id gets one from its content,
    so that adding it again changes nothing.

    Attributes:
        client: The cache.
        k: At most so many passages of a search.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    client: CacheClient
    k: int = DEFAULT_TOP_K

    def upsert(self, items: Sequence[Document], /, **kwargs: Any) -> UpsertResponse:
        """Store documents; each is cached when this returns.

        A document that cannot be stored (no text, metadata that are no JSON) is among ``failed``,
        with the reason in the log, and the others go on.

        Raises:
            ChunkCacheError: The store or the server fails: going on would not help.
        """
        succeeded: list[str] = []
        failed: list[str] = []
        for item in items:
            identifier = item.id or _content_id(item)
            try:
                self.client.put(identifier, item.page_content, item.metadata)
            except InvalidValueError as error:
                _log.warning(
                    "document_refused", id=identifier, code=error.code, reason=error.message
                )
                failed.append(identifier)
            else:
                succeeded.append(identifier)
        return UpsertResponse(succeeded=succeeded, failed=failed)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> DeleteResponse:
        """Remove documents from every tier; an id that is not there is no failure.

        Raises:
            ValueError: No ids are given.
        """
        if ids is None:
            raise ValueError("delete needs the ids of documents")
        gone = [i for i in ids if self.client.delete(i)]
        return DeleteResponse(num_deleted=len(gone), succeeded=gone, num_failed=0, failed=[])

    def get(self, ids: Sequence[str], /, **kwargs: Any) -> list[Document]:
        """Whole documents by their ids; those that are not there are left out."""
        return list(self._stored(ids))

    def _stored(self, ids: Sequence[str]) -> Iterator[Document]:
        for identifier in dict.fromkeys(ids):
            found = self.client.get(identifier)
            if found is not None:
                yield Document(
                    id=found.document_id, page_content=found.text, metadata=dict(found.metadata)
                )

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        return [_document(p) for p in self.client.search(query, self.k if k is None else k)]


def _document(passage: Passage) -> Document:
    return Document(
        id=passage.document_id, page_content=passage.text, metadata=place_metadata(passage)
    )


def _content_id(document: Document) -> str:
    return blake3(document.page_content.encode("utf-8", "surrogatepass")).hexdigest(16)
