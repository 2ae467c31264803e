"""What the tests of upkeep share: a store with a bit of everything, without a model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chunkcache.catalog import Catalog
from chunkcache.catalog_values import Neighbour
from chunkcache.documents import Chunk, Document
from chunkcache.entry import Entry
from chunkcache.identity import (
    EntryIdentity,
    ModelDigest,
    TenantNamespace,
    TokenizerDigest,
    chunk_id,
)
from chunkcache.store.environment import StoreEnvironment
from chunkcache.upkeep.pack_export import export_pack

NAMESPACE = TenantNamespace(b"n" * 32)
TOKENIZER = TokenizerDigest(b"t" * 32)
MODEL = ModelDigest(b"m" * 32)
OLD_MODEL = ModelDigest(b"o" * 32)
EMBEDDER = b"e" * 32
BEHIND = "neighbours(1)"


@dataclass
class Furnished:
    """A store with documents, entries of two models, neighbours and embeddings.

    Attributes:
        env: The store.
        catalog: A tenant's documents.
        now: What its clock says.
    """

    env: StoreEnvironment
    now: float = 100.0

    def __post_init__(self) -> None:
        self.catalog = Catalog(self.env, NAMESPACE, lambda: self.now)

    def document(self, name: str, *words: str, expires_at: float | None = None) -> Document:
        """A document of one chunk per word."""
        text, chunks = " ".join(words), []
        for word in words:
            ids = tuple(map(ord, word))
            start = text.index(word)
            chunks.append(Chunk(self.chunk(word), start, start + len(word), ids))
        return Document(
            name, text, {"of": name}, tuple(chunks), TOKENIZER, "words", expires_at=expires_at
        )

    def chunk(self, word: str) -> Any:
        """A word's chunk id."""
        return chunk_id(NAMESPACE, TOKENIZER, tuple(map(ord, word)))

    def entry(self, word: str, model: ModelDigest = MODEL, behind: tuple[str, ...] = ()) -> Entry:
        """A word's entry."""
        identity = EntryIdentity(
            model=model,
            namespace=NAMESPACE,
            preparation=BEHIND if behind else "alone",
            prefix_ids=tuple(map(ord, "".join(behind))),
            codec="bf16",
            token_ids=tuple(map(ord, word)),
            behind=tuple(self.chunk(b) for b in behind),
        )
        generator = torch.Generator().manual_seed(len(word))
        k = torch.randn((2, len(word), 2, 16), generator=generator).bfloat16()
        return Entry(identity, identity.key(), k=k, v=-k)

    def put(self, name: str, *words: str, expires_at: float | None = None) -> None:
        """Store a document with an entry of each word's chunk."""
        self.catalog.put(
            self.document(name, *words, expires_at=expires_at),
            entries=[self.entry(word) for word in words],
            now=self.now,
        )

    def furnish(self) -> None:
        """Three documents: two share a chunk, one expires; one chunk has a neighbour."""
        self.put("first", "alpha", "beta")
        self.put("second", "beta", "gamma")
        self.put("third", "delta", expires_at=500.0)
        old = [self.entry("alpha", OLD_MODEL), self.entry("gamma", OLD_MODEL)]
        self.catalog.put(self.document("first", "alpha", "beta"), entries=old[:1], now=self.now)
        self.catalog.put(self.document("second", "beta", "gamma"), entries=old[1:], now=self.now)
        neighbour = Neighbour(self.chunk("gamma"), tuple(map(ord, "gamma")))
        self.catalog.put_neighbours(BEHIND, {self.chunk("alpha"): [neighbour]})
        behind = self.entry("alpha", behind=("gamma",))
        self.catalog.put(self.document("first", "alpha", "beta"), entries=[behind], now=self.now)
        vectors = {self.chunk(w): np.full(3, 1.0, np.float32) for w in ("alpha", "beta")}
        self.catalog.put_vectors(EMBEDDER, vectors)


@pytest.fixture
def furnished(tmp_path: Path) -> Iterator[Furnished]:
    """A store with a bit of everything."""
    with StoreEnvironment.open(tmp_path / "store", max_bytes=1 << 30) as env:
        store = Furnished(env)
        store.furnish()
        yield store


@pytest.fixture
def change() -> Callable[..., None]:
    """Changes a stored value behind the catalog's back; None as the new value removes it."""

    def apply(store: Furnished, database: Any, key: bytes, new: Any) -> None:
        def body(txn: Any) -> None:
            old = txn.get(database, key)
            value = new(bytes(old)) if callable(new) else new
            if value is None:
                txn.delete(database, key)
            else:
                txn.put(database, key, value)

        store.env.update(body)

    return apply


@pytest.fixture
def source(open_cache: Callable[..., Any], passages: dict[str, str]) -> Any:
    """A cache with four documents, two of the same words."""
    cache = open_cache("source")
    for name, text in passages.items():
        cache.put(name, text, {"of": name})
    # The same words again: a chunk that two documents share comes once.
    cache.put("tower again", passages["tower"])
    return cache


@pytest.fixture
def pack(source: Any, tmp_path: Path) -> Path:
    """Its pack."""
    runtime, catalog = source.runtime, source.catalog
    export_pack(runtime.env, catalog.namespace, tmp_path / "pack")
    return tmp_path / "pack"
