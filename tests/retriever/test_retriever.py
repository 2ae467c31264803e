"""Searching a catalog: the index follows the documents, and hits are what is stored."""

import numpy as np
import pytest

from chunkcache.errors import InvalidValueError, ModelError, StoreFullError
from chunkcache.identity import TenantNamespace
from chunkcache.planning import DocumentRef
from chunkcache.store.transaction import Database
from chunkcache_retriever.catalog_index import NO_TEXT
from chunkcache_retriever.retriever import MAX_TOP_K, Retriever
from chunkcache_retriever.testing import FixedEmbedder


def num_vectors(env):
    with env.read() as txn:
        return txn.num_entries(Database.VECTORS)


def test_a_hit_says_where_its_text_is(shelf, embedder):
    document = shelf.put("d", "the red fox", "a blue whale", "the green frog")
    hit = Retriever(shelf, embedder, "dense").search("blue whale", 1)[0]
    assert (hit.document_id, hit.chunk_index, hit.text) == ("d", 1, "a blue whale")
    assert document.text[hit.start : hit.end] == hit.text
    assert hit.chunk_id == document.chunks[1].chunk_id
    assert 0.7 < hit.score <= 1.0
    assert hit.also_in == ()


def test_more_than_there_is_gives_all_once(shelf, retriever):
    shelf.put("d", "one", "two", "three")
    for top_k in (3, 10, MAX_TOP_K):
        hits = retriever.search("two", top_k)
        assert sorted(h.text for h in hits) == ["one", "three", "two"]
        assert hits[0].text == "two"


@pytest.mark.parametrize("top_k", [0, -1, MAX_TOP_K + 1, 10**9, True, 2.0, None])
def test_top_k_out_of_range_is_refused(shelf, retriever, top_k):
    shelf.put("d", "one")
    with pytest.raises(InvalidValueError) as caught:
        retriever.search("one", top_k)
    assert caught.value.param == "top_k"


@pytest.mark.parametrize("query", ["", "   ", "\n\n", "\u200b", "?!", "\ud800"])
def test_a_query_without_text_is_refused(shelf, retriever, query):
    shelf.put("d", "one")
    for search in (retriever.search, retriever.retrieve):
        with pytest.raises(InvalidValueError) as caught:
            search(query)
        assert (caught.value.param, caught.value.code) == ("query", "invalid_value")


def test_no_documents_no_hits(retriever, embedder):
    assert retriever.search("anything") == []
    assert retriever.retrieve("anything") == ()
    assert retriever.sync().num_chunks == 0


def test_the_same_document_again_adds_nothing(shelf, retriever, embedder, texts_of):
    for _ in range(3):
        shelf.put("d", "old words", "more old words")
        retriever.sync()
    report = retriever.sync()
    assert (report.num_chunks, report.num_vectors, embedder.num_embedded) == (2, 2, 2)
    shelf.put("d", "new text")
    report = retriever.sync()
    assert (report.num_vectors, report.num_removed, report.num_embedded) == (1, 2, 1)
    assert texts_of(retriever, "old words") == ["new text"]


def test_ids_after_removals_name_their_own_texts(shelf, retriever, texts_of):
    for i in range(10):
        shelf.put(f"d{i}", f"text number{i}")
    retriever.sync()
    for i in range(1, 10, 2):
        shelf.delete(f"d{i}")
    for i in range(10, 15):
        shelf.put(f"d{i}", f"text number{i}")
    live = [*range(0, 10, 2), *range(10, 15)]
    for i in live:
        hit = retriever.search(f"number{i}", 1)[0]
        assert (hit.document_id, hit.text) == (f"d{i}", f"text number{i}")
    assert sorted(texts_of(retriever, "text", 100)) == sorted(f"text number{i}" for i in live)


def test_deleting_the_first_document_moves_no_other(shelf, retriever):
    for i in range(5):
        shelf.put(f"d{i}", f"phrase{i} of its own")
    retriever.sync()
    shelf.delete("d0")
    hit = retriever.search("phrase4", 1)[0]
    assert (hit.document_id, hit.text) == ("d4", "phrase4 of its own")


class Faulty(FixedEmbedder):
    """Gives a fault for texts that hold its name."""

    faults = (("nan", np.nan), ("inf", np.inf), ("zero", 0.0))

    def embed(self, texts, *, is_query=False):
        vectors = super().embed(texts, is_query=is_query)
        for i, text in enumerate(texts):
            for word, value in self.faults:
                if word in text:
                    vectors[i] = value
        return vectors


def test_bad_vectors_are_reported_and_the_rest_is_found(shelf, env, texts_of):
    embedder = Faulty()
    retriever = Retriever(shelf, embedder)
    document = shelf.put("d", "a nan", "an inf", "a zero", "a good one", "another good one")
    report = retriever.sync()
    bad = [c.chunk_id for c in document.chunks[:3]]
    assert list(report.not_indexed) == bad
    assert len(set(report.not_indexed.values())) == 2
    assert (report.num_vectors, num_vectors(env)) == (2, 2)
    assert set(texts_of(retriever, "good one")) == {"a good one", "another good one"}
    for query in ("nan", "inf", "zero"):
        with pytest.raises(InvalidValueError):
            retriever.search(query)
    num_embedded = embedder.num_embedded
    shelf.put("e", "unrelated")
    assert retriever.sync().num_embedded == 1
    assert embedder.num_embedded == num_embedded + 1
    shelf.delete("d")
    assert not retriever.sync().not_indexed


def test_another_embedder_has_its_own_vectors(shelf, env):
    shelf.put("d", "alpha beta", "gamma delta")
    first = FixedEmbedder(dim=64)
    assert Retriever(shelf, first).search("gamma", 1)[0].text == "gamma delta"
    for other in (FixedEmbedder(dim=128), FixedEmbedder(dim=64, name="other")):
        retriever = Retriever(shelf, other, "dense")
        hit = retriever.search("gamma", 1)[0]
        assert (hit.text, hit.score > 0.6) == ("gamma delta", True)
        assert (retriever.sync().num_loaded, retriever.sync().num_embedded) == (0, 2)
    assert num_vectors(env) == 6
    again = Retriever(shelf, first)
    assert (again.sync().num_loaded, again.sync().num_embedded) == (2, 0)
    shelf.delete("d")
    assert num_vectors(env) == 0


def test_one_digest_with_two_widths_shares_nothing(shelf):
    shelf.put("d", "alpha beta", "gamma delta")
    narrow, wide = FixedEmbedder(dim=64), FixedEmbedder(dim=128)
    wide.digest = narrow.digest
    Retriever(shelf, wide).sync()
    retriever = Retriever(shelf, narrow)
    assert retriever.sync().num_embedded == 2
    assert retriever.search("gamma", 1)[0].text == "gamma delta"


def test_an_embedder_of_another_width_than_it_says_is_refused(shelf):
    embedder = FixedEmbedder(dim=64)
    retriever = Retriever(shelf, embedder)
    embedder.embed = FixedEmbedder(dim=128).embed
    shelf.put("d", "alpha")
    with pytest.raises(ModelError, match=r"64.*128"):
        retriever.sync()


def test_a_restart_embeds_nothing_and_finds_the_same(shelf, embedder):
    words = [f"w{i}" for i in range(300)]
    shelf.put("d", "short", " ".join(words), "...")
    shelf.put("e", *(f"passage {w}" for w in words[:100]))
    before = Retriever(shelf, embedder)
    hits = before.search("w299 passage", 20)
    assert before.sync().num_embedded == 103
    num_embedded = embedder.num_embedded
    after = Retriever(shelf, embedder)
    report = after.sync()
    assert (report.num_loaded, report.num_embedded) == (103, 0)
    assert report.num_vectors == before.sync().num_vectors > 102
    assert embedder.num_embedded == num_embedded
    assert after.search("w299 passage", 20) == hits


def test_a_long_document_is_read_once(shelf, embedder, monkeypatch):
    """Not once for each batch of its chunks: that would grow with the square of its length."""
    shelf.put("d", *(f"passage {i}" for i in range(300)))
    asked: list[str] = []
    get_many = shelf.catalog.get_many

    def counted(document_ids):
        asked.extend(wanted := list(document_ids))
        return get_many(wanted)

    monkeypatch.setattr(shelf.catalog, "get_many", counted)
    assert Retriever(shelf, embedder).sync().num_embedded == 300
    assert asked == ["d"]


def test_the_end_of_a_long_chunk_is_found(shelf, retriever):
    filler = " ".join(f"filler{i % 50}" for i in range(2_000))
    shelf.put("long", filler + " purple elephant")
    shelf.put("other", "filler1 filler2", "a room")
    hit = retriever.search("purple elephant", 1)[0]
    assert hit.document_id == "long"
    assert hit.text.endswith("purple elephant")
    assert [h.document_id for h in retriever.search("filler3", 9)].count("long") == 1


def test_a_long_query_is_used_to_its_end(shelf, retriever):
    shelf.put("d", "purple elephant", "green frog")
    query = " ".join(f"filler{i}" for i in range(300)) + " purple elephant"
    assert retriever.search(query, 1)[0].text == "purple elephant"


def test_a_chunk_without_words_is_reported(shelf, retriever, texts_of):
    document = shelf.put("d", "alpha", "...")
    assert retriever.sync().not_indexed == {document.chunks[1].chunk_id: NO_TEXT}
    assert texts_of(retriever, "alpha") == ["alpha"]


def test_a_passage_in_two_documents_takes_one_place(shelf, retriever):
    shelf.put("a", "the shared words", "only in a words")
    shelf.put("b", "only in b words", "the shared words")
    shelf.put("c", "  the shared\nwords", "only in c words")
    hits = retriever.search("the shared words", 3)
    assert [" ".join(h.text.split()) for h in hits].count("the shared words") == 1
    assert len(hits) == 3
    assert (hits[0].document_id, hits[0].chunk_index) in [("a", 0), ("c", 0)]
    places = {(hits[0].document_id, hits[0].chunk_index), *hits[0].also_in}
    assert places == {("a", 0), ("b", 1), ("c", 0)}
    assert len(hits[0].also_in) == 2
    refs = retriever.retrieve("the shared words", 3)
    assert sum(len(r.chunk_indexes or ()) for r in refs) == 3
    shelf.delete("a")
    hits = retriever.search("the shared words", 3)
    assert {(hits[0].document_id, hits[0].chunk_index), *hits[0].also_in} == {("b", 1), ("c", 0)}


def test_many_copies_do_not_crowd_out_the_rest(shelf, retriever):
    for i in range(40):
        shelf.put(f"copy{i}", "the shared words" + " " * i)
    shelf.put("z", "the other words", "more of other words")
    assert len(retriever.search("the shared words", 3)) == 3


def test_references_are_grouped_by_document_in_order_of_rank(shelf, retriever):
    shelf.put("a", "cat", "dog cat", "cat dog bird", "fish")
    shelf.put("b", "cat dog bird cow", "sheep")
    assert retriever.retrieve("cat dog bird cow", 3) == (
        DocumentRef("b", (0,)),
        DocumentRef("a", (1, 2)),
    )


def test_a_shorter_version_leaves_nothing_behind(shelf, retriever, env, texts_of):
    shelf.put("d", *(f"version one part{i}" for i in range(10)))
    assert texts_of(retriever, "part9", 1) == ["version one part9"]
    shelf.put("d", *(f"version two part{i}" for i in range(4)))
    assert sorted(texts_of(retriever, "part9 one", 100)) == [
        f"version two part{i}" for i in range(4)
    ]
    assert (retriever.sync().num_vectors, num_vectors(env)) == (4, 4)


def test_a_deleted_document_is_gone_and_its_id_is_new(shelf, retriever, env, texts_of):
    shelf.put("d", "the secret code", "shared")
    shelf.put("e", "shared")
    assert texts_of(retriever, "secret code", 1) == ["the secret code"]
    shelf.delete("d")
    assert texts_of(retriever, "secret code", 9) == ["shared"]
    assert num_vectors(env) == 1
    shelf.put("d", "harmless")
    hits = retriever.search("secret code", 9)
    assert sorted((h.document_id, h.text) for h in hits) == [("d", "harmless"), ("e", "shared")]
    assert retriever.sync().num_vectors == 2


def test_tenants_find_their_own_alone(open_shelf, embedder):
    mine, theirs = open_shelf(), open_shelf(TenantNamespace(b"o" * 32))
    mine.put("d", "my secret")
    theirs.put("d", "their secret")
    for shelf, text in ((mine, "my secret"), (theirs, "their secret")):
        assert [h.text for h in Retriever(shelf, embedder).search("secret", 9)] == [text]


def test_a_full_store_is_still_searched(shelf, retriever, texts_of, monkeypatch):
    shelf.put("d", "alpha", "beta")

    def full(digest, vectors):
        raise StoreFullError("full")

    monkeypatch.setattr(shelf.catalog, "put_vectors", full)
    assert texts_of(retriever, "beta", 1) == ["beta"]
    assert retriever.sync().num_unsaved == 2


def test_an_interrupted_sync_is_taken_up_again(shelf, embedder, texts_of):
    class Stops(FixedEmbedder):
        def embed(self, texts, *, is_query=False):
            if self.num_embedded >= 64:
                raise RuntimeError("out of memory")
            return super().embed(texts, is_query=is_query)

    shelf.put("d", *(f"passage{i}" for i in range(100)))
    stops = Stops()
    retriever = Retriever(shelf, stops)
    with pytest.raises(RuntimeError, match="memory"):
        retriever.sync()
    stops.num_embedded = 0
    report = retriever.sync()
    assert (report.num_loaded, report.num_embedded) == (64, 36)
    assert texts_of(retriever, "passage99", 1) == ["passage99"]
