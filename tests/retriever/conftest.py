"""What the retriever's tests share: a catalog without a model, documents of given passages."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from chunkcache.catalog import Catalog
from chunkcache.documents import Chunk, Document, Metadata
from chunkcache.identity import TenantNamespace, TokenizerDigest, chunk_id
from chunkcache.store.environment import StoreEnvironment
from chunkcache_retriever.retriever import Retriever
from chunkcache_retriever.testing import FixedEmbedder

NAMESPACE = TenantNamespace(b"n" * 32)
TOKENIZER = TokenizerDigest(b"t" * 32)


@dataclass
class Shelf:
    """Documents of one tenant, put as lists of passages: one chunk each."""

    catalog: Catalog

    def put(
        self,
        document_id: str,
        *passages: str,
        gap: str = "\n\n",
        metadata: Metadata | None = None,
    ) -> Document:
        """Store a document; the gap belongs to no chunk."""
        chunks, start = [], 0
        for passage in passages:
            ids = tuple(map(ord, passage))
            name = chunk_id(self.catalog.namespace, TOKENIZER, ids)
            chunks.append(Chunk(name, start, start + len(passage), ids))
            start += len(passage) + len(gap)
        document = Document(
            document_id=document_id,
            text=gap.join(passages),
            metadata=metadata or {},
            chunks=tuple(chunks),
            tokenizer=TOKENIZER,
            chunking="passages",
        )
        return self.catalog.put(document, now=1.0).document

    def delete(self, document_id: str) -> None:
        """Remove a document that is there."""
        assert self.catalog.delete(document_id).existed


@pytest.fixture
def env(tmp_path: Path) -> Iterator[StoreEnvironment]:
    """An open, empty store."""
    with StoreEnvironment.open(tmp_path / "store", max_bytes=1 << 30) as environment:
        yield environment


@pytest.fixture
def open_shelf(env: StoreEnvironment) -> Callable[..., Shelf]:
    """Shelves of the store, by namespace."""
    return lambda namespace=NAMESPACE: Shelf(Catalog(env, namespace))


@pytest.fixture
def shelf(open_shelf: Callable[..., Shelf]) -> Shelf:
    """An empty shelf."""
    return open_shelf()


@pytest.fixture
def embedder() -> FixedEmbedder:
    """An embedder without a model."""
    return FixedEmbedder()


@pytest.fixture
def retriever(shelf: Shelf, embedder: FixedEmbedder) -> Retriever:
    """A retriever over the shelf."""
    return Retriever(shelf, embedder)


@pytest.fixture
def texts_of() -> Callable[..., list[str]]:
    """The texts that a search gives."""
    return lambda retriever, query, top_k=5: [h.text for h in retriever.search(query, top_k)]
