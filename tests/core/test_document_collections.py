"""Sets of documents: they change with the documents, in the same transaction, and hold no text."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from chunkcache import document_collections
from chunkcache.catalog import Catalog
from chunkcache.collection_values import collection_key
from chunkcache.documents import Chunk, Document, UploadedFile
from chunkcache.errors import (
    CollectionNotFoundError,
    DocumentNotFoundError,
    InvalidValueError,
    QuotaExceededError,
)
from chunkcache.identity import TenantNamespace, TokenizerDigest, chunk_id
from chunkcache.quota import TenantQuota
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.transaction import Database
from chunkcache.upkeep.findings import Fault
from chunkcache.upkeep.verify import verify

NS = TenantNamespace(b"n" * 32)
TOKENIZER = TokenizerDigest(b"t" * 32)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[StoreEnvironment]:
    with StoreEnvironment.open(tmp_path / "store", max_bytes=32 << 20) as env:
        yield env


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def catalog(env: StoreEnvironment, now: list[float]) -> Catalog:
    return Catalog(env, NS, lambda: now[0])


def put(catalog: Catalog, name: str, text: str = "word", **fields: object) -> None:
    ids = tuple(map(ord, text))
    chunk = Chunk(chunk_id(NS, TOKENIZER, ids), 0, len(text), ids)
    document = Document(name, text, {"of": name}, (chunk,), TOKENIZER, "whole", **fields)  # type: ignore[arg-type]
    catalog.put(document, now=100.0)


def names(catalog: Catalog, collection_id: str) -> list[str]:
    return [m.document.document_id for m in catalog.collections.members(collection_id)]


def test_a_set_holds_documents_and_says_what_is_said_of_them(catalog: Catalog) -> None:
    put(catalog, "a")
    put(catalog, "b", "other words")
    collections = catalog.collections
    made = collections.create("tools", description="d", metadata={"k": "v"}, document_ids=["a"])
    assert collections.get(made.collection_id) == made
    assert collections.list() == [made]
    member = collections.add(made.collection_id, "b", {"floor": 2})
    assert (member.attributes, member.added_at) == ({"floor": 2}, 100.0)
    assert names(catalog, made.collection_id) == ["a", "b"]
    size = collections.sizes()[made.collection_id]
    assert (size.num_documents, size.num_bytes) == (2, len("word") + len("other words"))
    assert collections.add(made.collection_id, "b").attributes == {"floor": 2}
    assert collections.add(made.collection_id, "b", {}).attributes == {}
    assert names(catalog, made.collection_id) == ["a", "b"]
    changed = collections.update(made.collection_id, name="pumps")
    assert (changed.name, changed.description, changed.metadata) == ("pumps", "d", {"k": "v"})
    assert catalog.require("a").collections == (made.collection_id,)


def test_a_new_version_stays_and_a_deleted_document_goes(
    catalog: Catalog, now: list[float]
) -> None:
    put(catalog, "a", file=UploadedFile("a.txt", "user_data"))
    made = catalog.collections.create("s", document_ids=["a"])
    put(catalog, "a", "a new text")
    (member,) = catalog.collections.members(made.collection_id)
    assert member.document.num_bytes == len("a new text")
    assert member.document.file == UploadedFile("a.txt", "user_data")
    catalog.delete("a")
    assert names(catalog, made.collection_id) == []
    put(catalog, "a")
    assert names(catalog, made.collection_id) == [], "another document of the same id"
    put(catalog, "short", expires_at=110.0)
    catalog.collections.add(made.collection_id, "short")
    now[0] = 111.0
    assert names(catalog, made.collection_id) == []
    assert catalog.collections.sizes() == {}
    with pytest.raises(DocumentNotFoundError):
        catalog.collections.member(made.collection_id, "short")


def test_leaving_a_set_and_its_end_leave_the_documents(catalog: Catalog) -> None:
    put(catalog, "a")
    one, two = (catalog.collections.create(n, document_ids=["a"]) for n in ("one", "two"))
    catalog.collections.remove(one.collection_id, "a")
    with pytest.raises(DocumentNotFoundError):
        catalog.collections.remove(one.collection_id, "a")
    assert names(catalog, two.collection_id) == ["a"]
    catalog.collections.delete(two.collection_id)
    for call in (catalog.collections.get, catalog.collections.members, catalog.collections.delete):
        with pytest.raises(CollectionNotFoundError):
            call(two.collection_id)
    assert catalog.require("a").collections == ()
    assert catalog.collections.list() == [one]


def test_a_set_is_made_whole_or_not_at_all(catalog: Catalog) -> None:
    put(catalog, "a")
    with pytest.raises(DocumentNotFoundError):
        catalog.collections.create("s", document_ids=["a", "none"])
    assert catalog.collections.list() == []
    assert catalog.require("a").collections == ()


def test_what_is_not_acceptable(catalog: Catalog) -> None:
    made = catalog.collections.create("s")
    with pytest.raises(DocumentNotFoundError):
        catalog.collections.add(made.collection_id, "none")
    with pytest.raises(CollectionNotFoundError):
        catalog.collections.add("vs_none", "none")
    for name in ("x" * 513, "a\nb", "\x00"):
        with pytest.raises(InvalidValueError):
            catalog.collections.create(name)
    with pytest.raises(InvalidValueError):
        catalog.collections.update(made.collection_id, metadata={"k": float("nan")})


def test_another_tenants_set_is_none(env: StoreEnvironment, catalog: Catalog) -> None:
    made = catalog.collections.create("s")
    other = Catalog(env, TenantNamespace(b"o" * 32))
    assert other.collections.list() == []
    with pytest.raises(CollectionNotFoundError):
        other.collections.get(made.collection_id)


def test_bounds(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_collections, "MAX_COLLECTIONS", 2)
    monkeypatch.setattr(document_collections, "MAX_MEMBERSHIPS", 1)
    put(catalog, "a")
    catalog.collections.create("one", document_ids=["a"])
    with pytest.raises(InvalidValueError):
        catalog.collections.create("two", document_ids=["a"])
    catalog.collections.create("two")
    with pytest.raises(QuotaExceededError):
        catalog.collections.create("three")


def test_what_is_said_of_documents_counts_against_the_quota(
    env: StoreEnvironment, catalog: Catalog
) -> None:
    put(catalog, "a")
    size = catalog.size()
    bounded = Catalog(env, NS, quota=TenantQuota(size.record_bytes + 500, bytes_per_token=0))
    made = bounded.collections.create("s", document_ids=["a"])
    with pytest.raises(QuotaExceededError):
        bounded.collections.add(made.collection_id, "a", {"k": "v" * 1_000})
    assert bounded.collections.member(made.collection_id, "a").attributes == {}
    bounded.collections.delete(made.collection_id)
    assert catalog.size() == size


def test_an_examination_knows_sets(env: StoreEnvironment, catalog: Catalog) -> None:
    made = catalog.collections.create("alone")
    assert verify(env).findings == ()
    put(catalog, "a")
    catalog.collections.add(made.collection_id, "a")
    assert verify(env).findings == ()
    key = collection_key(NS, made.collection_id)

    def damage(txn) -> None:
        value = bytes(txn.get(Database.DOCUMENTS, key))
        txn.put(Database.DOCUMENTS, key, value[:-1] + bytes([value[-1] ^ 1]))

    env.update(damage)
    assert catalog.collections.list() == []
    assert {f.fault for f in verify(env).findings} == {Fault.DAMAGED_COLLECTION}
    verify(env, repair=True)
    assert verify(env).findings == ()
    assert catalog.require("a").text == "word"
