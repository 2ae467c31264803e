"""Documents that expire: as if deleted from that moment on, whoever looks, until they are collected."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from chunkcache.catalog import Catalog
from chunkcache.documents import Chunk, Document
from chunkcache.errors import DocumentNotFoundError, InvalidValueError
from chunkcache.identity import TenantNamespace, TokenizerDigest, chunk_id
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.transaction import Database

NAMESPACE = TenantNamespace(b"n" * 32)
TOKENIZER = TokenizerDigest(b"t" * 32)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def catalog(tmp_path: Any, clock: Clock) -> Any:
    with StoreEnvironment.open(tmp_path / "store", max_bytes=1 << 30) as env:
        yield Catalog(env, NAMESPACE, clock)


@pytest.fixture
def document() -> Callable[..., Document]:
    """Builds documents of one chunk."""

    def make(name: str, text: str = "alpha", expires_at: float | None = None) -> Document:
        ids = tuple(map(ord, text))
        chunk = Chunk(chunk_id(NAMESPACE, TOKENIZER, ids), 0, len(text), ids)
        return Document(name, text, {}, (chunk,), TOKENIZER, "whole", expires_at=expires_at)

    return make


def test_it_is_found_until_that_moment_and_not_from_it_on(catalog, clock, document) -> None:
    catalog.put(document("stays", "beta"), now=clock())
    catalog.put(document("goes", expires_at=200.0), now=clock())
    generation = catalog.generation()
    clock.now = 199.9
    assert catalog.get("goes").expires_at == 200.0
    assert [d.expires_at for d in catalog.list(limit=9)] == [200.0, None]
    clock.now = 200.0
    assert catalog.get("goes") is None
    assert [d.document_id for d in catalog.list(limit=9)] == ["stays"]
    assert [d for _, d, _ in catalog.chunks()] == ["stays"]
    assert catalog.count() == 1
    # Indexes that are derived from the catalog see that something has changed.
    assert catalog.generation() > generation
    result = catalog.delete("goes")
    assert not result.existed
    assert len(result.removed.chunk_ids) == 1


def test_collecting_removes_all_that_it_alone_held(catalog, clock, document) -> None:
    catalog.put(document("stays", "alpha"), now=clock())
    catalog.put(document("shares", "alpha", expires_at=150.0), now=clock())
    catalog.put(document("goes", "beta", expires_at=200.0), now=clock())
    (chunk,) = document("goes", "beta").chunks
    catalog.put_vectors(b"e" * 32, {chunk.chunk_id: np.ones(3, np.float32)})
    clock.now = 200.0
    generation = catalog.generation()
    removed = catalog._env.update(lambda txn: catalog.delete_expired_in(txn, clock()))
    assert list(removed) == ["shares", "goes"]
    assert removed["shares"].chunk_ids == ()
    assert removed["goes"].chunk_ids == (chunk.chunk_id,)
    assert catalog.generation() == generation
    with catalog._env.read() as txn:
        # One document's two records and the numbers.
        assert txn.num_entries(Database.DOCUMENTS) == 3
        assert txn.num_entries(Database.CHUNKS) == 1
        assert txn.num_entries(Database.VECTORS) == 0
    clock.now = 1e9
    assert catalog.get("stays") is not None


def test_a_put_over_an_expired_document_begins_anew(catalog, clock, document) -> None:
    catalog.put(document("d", "alpha", expires_at=150.0), now=clock())
    clock.now = 160.0
    generation = catalog.generation()
    result = catalog.put(document("d", "alpha"), now=clock())
    assert result.status == "created"
    assert (result.document.version, result.document.created_at) == (1, 160.0)
    assert catalog.generation() > generation
    assert catalog.count() == 1
    clock.now = 1e9
    assert catalog.get("d") is not None


def test_each_put_sets_the_expiry_anew(catalog, clock, document) -> None:
    assert catalog.put(document("d", expires_at=150.0), now=clock()).status == "created"
    assert catalog.put(document("d", expires_at=150.0), now=clock()).status == "unchanged"
    later = catalog.put(document("d", expires_at=300.0), now=clock())
    assert (later.status, later.document.version) == ("updated", 1)
    clock.now = 200.0
    assert catalog.get("d") is not None
    assert catalog.put(document("d"), now=clock()).status == "updated"
    clock.now = 1e9
    assert catalog.get("d") is not None
    assert catalog.count() == 1


def test_an_expired_document_answers_no_question(open_cache, passages, monkeypatch) -> None:
    cache = open_cache()
    cache.put("tower", passages["tower"], ttl_seconds=60)
    assert cache.answer("Which code?", ["tower"], max_tokens=1).report.documents
    expires_at = cache.get("tower").expires_at
    assert expires_at is not None
    cache.catalog._clock = lambda: expires_at
    for use in (
        lambda: cache.answer("Which code?", ["tower"], max_tokens=1),
        lambda: cache.get("tower"),
        lambda: cache.delete("tower"),
    ):
        with pytest.raises(DocumentNotFoundError):
            use()
    # The refused delete has removed what there was all the same.
    assert cache.runtime.stack.stats().entries["disk"] == 0


@pytest.mark.parametrize(
    "expiry",
    [
        {"expires_at": 1.0},
        {"expires_at": math.nan},
        {"expires_at": math.inf},
        {"ttl_seconds": 0.0},
        {"ttl_seconds": -1.0},
        {"ttl_seconds": math.nan},
        {"ttl_seconds": math.inf},
        {"expires_at": 1e12, "ttl_seconds": 1.0},
    ],
)
def test_what_is_no_moment_to_come_is_refused(open_cache, expiry) -> None:
    with pytest.raises(InvalidValueError):
        open_cache().put("d", "text", **expiry)
