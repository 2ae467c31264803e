"""The catalog: versions, reference counts, tenants, and what goes with a document."""

import msgspec
import numpy as np
import pytest
import torch

from chunkcache.catalog import Catalog
from chunkcache.errors import (
    DocumentNotFoundError,
    InvalidValueError,
    StoreFormatError,
    StoreFullError,
)
from chunkcache.identity import ChunkId, ChunkKey, TenantNamespace
from chunkcache.store.disk import DiskTier
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.tier import MissReason
from chunkcache.store.transaction import Database

NAMESPACE = TenantNamespace(b"n" * 32)
OTHER = TenantNamespace(b"o" * 32)
EMBEDDER = b"e" * 32


@pytest.fixture
def catalog(env):
    return Catalog(env, NAMESPACE)


def num_keys(env, *databases):
    with env.read() as txn:
        return [txn.num_entries(d) for d in databases]


def test_a_new_document_comes_back_as_given(catalog, make_document):
    metadata = {"n": 1, "nested": {"list": [1, 2.5, None, True, "ü"]}, "long": "x" * 3_000}
    document = make_document("d", "alpha beta ü", metadata=metadata)
    result = catalog.put(document, now=10.0)
    assert result.status == "created"
    assert (result.document.version, result.document.created_at) == (1, 10.0)
    assert catalog.require("d") == result.document
    assert catalog.require("d").metadata == metadata
    assert catalog.count() == 1
    assert catalog.get("missing") is None
    with pytest.raises(DocumentNotFoundError):
        catalog.require("missing")


def test_the_same_document_again_writes_nothing(catalog, env, make_document):
    catalog.put(make_document(metadata={"a": 1, "b": 2}), now=1.0)
    generation = catalog.generation()
    result = catalog.put(make_document(metadata={"b": 2, "a": 1}), now=2.0)
    assert result.status == "unchanged"
    assert result.document.updated_at == 1.0
    assert catalog.generation() == generation


@pytest.mark.parametrize(
    ("change", "version"),
    [
        ({"text": "alpha gamma"}, 2),
        ({"metadata": {"a": 1.0}}, 1),
        ({"chunking": "other"}, 1),
        ({"tokenizer": b"u" * 32}, 1),
    ],
)
def test_a_change_is_an_update_and_a_change_of_text_a_version(
    catalog, make_document, change, version
):
    catalog.put(make_document(metadata={"a": 1}), now=1.0)
    result = catalog.put(make_document(**{"metadata": {"a": 1}} | change), now=2.0)
    assert result.status == "updated"
    assert result.document.version == version
    assert (result.document.created_at, result.document.updated_at) == (1.0, 2.0)
    assert catalog.require("d") == result.document
    assert catalog.generation() == 2


def test_a_shorter_version_leaves_no_old_chunk(catalog, env, make_document, make_entry):
    words = [f"word{i}" for i in range(10)]
    old = make_document("d", " ".join(words))
    entries = [make_entry(i, token_ids=c.token_ids) for i, c in enumerate(old.chunks)]
    catalog.put(old, entries=entries, now=1.0)
    new = make_document("d", "word0 word1 new1 new2")
    result = catalog.put(new, now=2.0)
    assert set(result.removed.chunk_ids) == {c.chunk_id for c in old.chunks[2:]}
    assert set(result.removed.entry_keys) == {e.key for e in entries[2:]}
    assert [c for c, _, _ in catalog.chunks()] == [c.chunk_id for c in new.chunks]
    assert num_keys(env, Database.CHUNKS, Database.ENTRIES) == [4, 2]
    assert catalog.require("d").version == 2


def test_a_shared_chunk_stays_until_its_last_document_goes(catalog, env, make_document, make_entry):
    one = make_document("one", "shared mine shared")
    two = make_document("two", "shared yours")
    shared = one.chunks[0]
    entry = make_entry(token_ids=shared.token_ids)
    catalog.put(one, entries=[entry], now=1.0)
    catalog.put(two, now=1.0)
    catalog.put_vectors(EMBEDDER, {shared.chunk_id: np.ones(4, np.float32)})

    first = catalog.delete("one")
    assert first.existed
    assert first.removed.chunk_ids == (one.chunks[1].chunk_id,)
    assert first.removed.entry_keys == ()
    assert DiskTier(env).num_entries == 1
    assert set(catalog.get_vectors(EMBEDDER, [shared.chunk_id])) == {shared.chunk_id}

    second = catalog.delete("two")
    assert set(second.removed.chunk_ids) == {c.chunk_id for c in two.chunks}
    assert second.removed.entry_keys == (entry.key,)
    assert DiskTier(env).get(entry.identity) is MissReason.ABSENT
    assert catalog.get_vectors(EMBEDDER, [shared.chunk_id]) == {}
    assert num_keys(env, Database.CHUNKS, Database.ENTRIES, Database.VECTORS) == [0, 0, 0]
    assert catalog.count() == 0
    assert not catalog.delete("two").existed


def test_a_recycled_id_inherits_nothing(catalog, make_document):
    catalog.put(make_document("d", "secret words", metadata={"a": 1}), now=1.0)
    catalog.put(make_document("d", "secret again"), now=2.0)
    catalog.delete("d")
    result = catalog.put(make_document("d", "harmless"), now=3.0)
    assert result.status == "created"
    assert (result.document.version, result.document.created_at) == (1, 3.0)
    assert [c for c, _, _ in catalog.chunks()] == [result.document.chunks[0].chunk_id]


def test_entries_linked_later_go_with_any_chunk_they_are_linked_to(
    catalog, env, make_document, make_entry
):
    catalog.put(make_document("d", "alpha"), now=1.0)
    catalog.put(make_document("neighbour", "beta"), now=1.0)
    alpha, beta = (catalog.require(d).chunks[0].chunk_id for d in ("d", "neighbour"))
    entry = make_entry()
    DiskTier(env).put(entry)
    assert catalog.link_entry(entry.key, [alpha])
    assert catalog.link_entry(entry.key, [beta])
    assert catalog.delete("neighbour").removed.entry_keys == (entry.key,)
    assert DiskTier(env).num_entries == 0
    assert not catalog.link_entry(entry.key, [beta])


def test_an_entry_of_no_chunk_is_refused(catalog, make_document, make_entry):
    for entry in (make_entry(), make_entry(token_ids=(97,), namespace=OTHER)):
        with pytest.raises(InvalidValueError):
            catalog.put(make_document("d", "a"), entries=[entry], now=1.0)
    assert catalog.count() == 0


def test_a_non_finite_entry_is_left_out_and_named(catalog, env, make_document, make_entry):
    document = make_document("d", "alpha beta")
    good, bad = (make_entry(i, token_ids=c.token_ids) for i, c in enumerate(document.chunks))
    bad.v[1, 0, 0, 0] = torch.inf
    result = catalog.put(document, entries=[good, bad], now=1.0)
    assert result.refused_entry_keys == (bad.key,)
    assert DiskTier(env).num_entries == 1


def test_a_put_that_does_not_fit_changes_nothing(tmp_path, make_document, make_entry):
    with StoreEnvironment.open(tmp_path / "s", max_bytes=64 << 20) as env:
        catalog = Catalog(env, NAMESPACE)
        catalog.put(make_document("d", "old"), now=1.0)
        document = make_document("d", " ".join(f"w{i}" for i in range(40)))
        entries = [
            make_entry(i, token_ids=c.token_ids, num_layers=10_000)
            for i, c in enumerate(document.chunks)
        ]
        with pytest.raises(StoreFullError):
            catalog.put(document, entries=iter(entries), now=2.0)
        assert catalog.require("d").text == "old"
        assert (catalog.generation(), DiskTier(env).num_entries) == (1, 0)
        assert [i for _, i, _ in catalog.chunks()] == ["d"]


def test_tenants_see_nothing_of_each_other(env, make_document):
    mine, theirs = Catalog(env, NAMESPACE), Catalog(env, OTHER)
    mine.put(make_document("d", "alpha"), now=1.0)
    assert theirs.get("d") is None
    assert theirs.list(limit=10) == []
    assert list(theirs.chunks()) == []
    assert (theirs.count(), theirs.generation()) == (0, 0)
    assert not theirs.delete("d").existed
    chunk = mine.require("d").chunks[0].chunk_id
    assert not theirs.link_entry(ChunkKey(b"k" * 32), [chunk])
    assert theirs.put_vectors(EMBEDDER, {chunk: np.zeros(2, np.float32)}) == 0
    theirs.put(make_document("d", "beta", namespace=OTHER), now=1.0)
    assert theirs.delete("d").existed
    assert mine.require("d").text == "alpha"


def test_listing_is_in_order_and_pages_do_not_overlap(catalog, make_document):
    long = "p" * 300
    ids = ["b", "a", "ab", "é", "z", "🎈", "a b", *(f"{long}{i}" for i in range(20)), long, "~"]
    for document_id in ids:
        catalog.put(make_document(document_id), now=1.0)
    expected = sorted(ids)
    assert [i.document_id for i in catalog.list(limit=1_000)] == expected
    for size in (1, 3, 7):
        seen, after = [], None
        while page := catalog.list(after=after, limit=size):
            assert len(page) <= size
            seen += [i.document_id for i in page]
            after = seen[-1]
        assert seen == expected
    assert [i.document_id for i in catalog.list(after="aa", limit=2)] == ["ab", "b"]
    with pytest.raises(InvalidValueError):
        catalog.list(limit=0)


def test_info_agrees_with_the_document(catalog, make_document):
    document = catalog.put(make_document("d", "alpha beta", metadata={"k": "v"}), now=5.0).document
    [info] = catalog.list(limit=1)
    assert info.digest == document.digest.hex()
    assert (info.num_chunks, info.num_tokens, info.num_chars) == (2, 9, 10)
    assert (info.metadata, info.version, info.created_at) == ({"k": "v"}, 1, 5.0)


@pytest.mark.parametrize("document_id", ["x" * 511, "x" * 512, "🎈" * 200, "ü" * 2_000])
def test_an_id_of_any_length_can_be_stored(catalog, make_document, document_id):
    catalog.put(make_document("before"), now=1.0)
    catalog.put(make_document(document_id), now=1.0)
    assert set(catalog.get_many([document_id, "before", "none"])) == {document_id, "before"}
    assert catalog.delete(document_id).existed


def test_a_document_can_have_many_chunks(catalog, make_document):
    document = make_document("d", " ".join(f"w{i}" for i in range(1_000)))
    catalog.put(document, now=1.0)
    assert catalog.require("d").chunks == document.chunks
    assert [(d, i) for _, d, i in catalog.chunks()] == [("d", i) for i in range(1_000)]


def test_chunks_are_read_in_batches_and_may_be_changed_meanwhile(catalog, make_document):
    for i in range(600):
        catalog.put(make_document(f"{i:04}", f"only{i}"), now=1.0)
    seen = []
    for _, document_id, _ in catalog.chunks():
        seen.append(document_id)
        if document_id == "0000":
            catalog.delete("0599")
    assert seen == [f"{i:04}" for i in range(599)]


def test_vectors_keep_every_bit_and_belong_to_an_embedder(catalog, make_document):
    catalog.put(make_document("d", "alpha"), now=1.0)
    chunk = catalog.require("d").chunks[0].chunk_id
    vector = np.random.default_rng(0).standard_normal(384).astype(np.float32)
    kept = catalog.put_vectors(EMBEDDER, {chunk: vector, ChunkId(b"x" * 32): vector})
    assert kept == 1
    found = catalog.get_vectors(EMBEDDER, [chunk, ChunkId(b"x" * 32)])
    assert list(found) == [chunk]
    np.testing.assert_array_equal(found[chunk], vector)
    found[chunk][:] = 0
    np.testing.assert_array_equal(catalog.get_vectors(EMBEDDER, [chunk])[chunk], vector)
    assert catalog.get_vectors(b"f" * 32, [chunk]) == {}
    with pytest.raises(InvalidValueError):
        catalog.put_vectors(EMBEDDER, {chunk: np.array([np.nan], np.float32)})


def test_a_flipped_bit_in_a_record_is_noticed(catalog, env, make_document):
    catalog.put(make_document("d", "alpha"), now=1.0)

    def flip(txn):
        for key, value in list(txn.scan(Database.DOCUMENTS, NAMESPACE + b"T")):
            data = bytearray(value)
            data[len(data) // 2] ^= 1
            txn.put(Database.DOCUMENTS, key, bytes(data))

    env.update(flip)
    with pytest.raises(StoreFormatError):
        catalog.get("d")


def test_reference_counts_equal_a_recount_after_any_history(catalog, env, make_document):
    rng = np.random.default_rng(1)
    documents: dict[str, set[ChunkId]] = {}
    for step in range(150):
        document_id = f"d{rng.integers(6)}"
        if rng.random() < 0.3:
            assert catalog.delete(document_id).existed == (document_id in documents)
            documents.pop(document_id, None)
        else:
            text = " ".join(f"w{rng.integers(8)}" for _ in range(rng.integers(1, 5)))
            document = catalog.put(make_document(document_id, text), now=float(step)).document
            documents[document_id] = {c.chunk_id for c in document.chunks}
        expected: dict[bytes, int] = {}
        for chunks in documents.values():
            for chunk in chunks:
                expected[NAMESPACE + chunk] = expected.get(NAMESPACE + chunk, 0) + 1
        with env.read() as txn:
            found = {
                key: msgspec.msgpack.decode(value[8:])["num_documents"]
                for key, value in txn.scan(Database.CHUNKS)
            }
        assert found == expected
        assert catalog.count() == len(documents)
