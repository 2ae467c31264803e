"""Searching by meaning and words at once, with filters, through every change."""

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from chunkcache.catalog import Catalog
from chunkcache.errors import InvalidValueError
from chunkcache.store.environment import StoreEnvironment
from chunkcache_retriever.metadata_filter import parse_filter
from chunkcache_retriever.retriever import Retriever
from chunkcache_retriever.testing import FixedEmbedder


class BlindEmbedder(FixedEmbedder):
    """Sees no difference between texts: whatever is found well is found by words."""

    def embed(self, texts, *, is_query=False):
        return np.ones((len(texts), self.dim), np.float32) / np.sqrt(np.float32(self.dim))


def eq(key: str, value: object):
    return parse_filter({"type": "eq", "key": key, "value": value})


def test_words_find_what_vectors_do_not(shelf) -> None:
    for i in range(20):
        shelf.put(f"d{i:02}", f"Error code E{i:03} means that valve {i} is shut")
    blind = BlindEmbedder()
    for ranking in ("hybrid", "bm25"):
        assert Retriever(shelf, blind, ranking).search("What is E013?", 1)[0].document_id == "d13"
    assert Retriever(shelf, blind, "dense").search("What is E013?", 1)[0].document_id != "d13"


def test_vectors_find_what_shares_no_word(shelf, embedder) -> None:
    shelf.put("d", "the zebra", "a whale")
    hits = Retriever(shelf, embedder).search("an altogether different question", 5)
    assert {h.text for h in hits} == {"the zebra", "a whale"}
    assert Retriever(shelf, embedder, "bm25").search("an altogether different question") == []


def test_an_unknown_ranking_is_refused(shelf, embedder) -> None:
    with pytest.raises(InvalidValueError, match="'best'"):
        Retriever(shelf, embedder, "best")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("ranking", ["hybrid", "dense", "bm25"])
def test_deleted_and_replaced_texts_are_gone_from_both(shelf, embedder, ranking) -> None:
    retriever = Retriever(shelf, embedder, ranking)
    shelf.put("a", "the red fox", "the red hound")
    shelf.put("b", "the red whale")
    assert len(retriever.search("red", 9)) == 3
    shelf.put("a", "the red hound")
    shelf.delete("b")
    assert [h.text for h in retriever.search("red fox whale", 9)] == ["the red hound"]
    shelf.put("b", "a red crab")
    assert {h.text for h in retriever.search("red", 9)} == {"the red hound", "a red crab"}


@pytest.mark.parametrize("ranking", ["hybrid", "dense", "bm25"])
def test_filters_choose_documents(shelf, embedder, ranking) -> None:
    retriever = Retriever(shelf, embedder, ranking)
    for i in range(30):
        shelf.put(f"d{i:02}", f"the red fox number {i}", metadata={"year": 2000 + i})
    shelf.put("none", "the red fox of no year")
    for year in (2000, 2017, 2029):
        (hit,) = retriever.search("red fox", 5, eq("year", year))
        assert hit.document_id == f"d{year - 2000:02}"
    late = parse_filter({"type": "gte", "key": "year", "value": 2025})
    assert {h.document_id for h in retriever.search("red fox", 9, late)} == {
        f"d{i}" for i in range(25, 30)
    }
    assert retriever.search("red fox", 5, eq("year", 1999)) == []
    assert [r.document_id for r in retriever.retrieve("red fox", 5, eq("year", 2003))] == ["d03"]


def test_a_passage_of_two_documents_is_found_in_the_wanted_one(shelf, embedder) -> None:
    shelf.put("a", "the red fox", metadata={"team": "one"})
    shelf.put("b", "the red fox", metadata={"team": "two"})
    (hit,) = Retriever(shelf, embedder).search("fox", 5, eq("team", "two"))
    assert (hit.document_id, hit.also_in) == ("b", ())


def test_changed_metadata_count_at_once(shelf, embedder) -> None:
    retriever = Retriever(shelf, embedder)
    shelf.put("a", "the red fox", metadata={"team": "one"})
    assert retriever.search("fox", 5, eq("team", "two")) == []
    shelf.put("a", "the red fox", metadata={"team": "two"})
    assert len(retriever.search("fox", 5, eq("team", "two"))) == 1


def _write_documents(folder: str, namespace: bytes, put, first: int, num_documents: int) -> None:
    with StoreEnvironment.open(Path(folder), max_bytes=1 << 30) as env:
        catalog = Catalog(env, namespace)
        for i in range(first, first + num_documents):
            put(catalog, i)
        Retriever(_Owner(catalog), FixedEmbedder()).sync()
        if num_documents:
            os.kill(os.getpid(), signal.SIGKILL)


class _Owner:
    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog


def _put(catalog: Catalog, i: int) -> None:
    from chunkcache.documents import Chunk, Document
    from chunkcache.identity import TokenizerDigest, chunk_id

    tokenizer = TokenizerDigest(b"t" * 32)
    text = f"passage number{i} of the red fox"
    ids = tuple(map(ord, text))
    chunk = Chunk(chunk_id(catalog.namespace, tokenizer, ids), 0, len(text), ids)
    catalog.put(Document(f"d{i}", text, {}, (chunk,), tokenizer, "passages"), now=1.0)


def test_an_index_answers_while_another_process_writes_and_is_killed(
    tmp_path: Path, open_shelf, shelf, env: StoreEnvironment, embedder
) -> None:
    """What a process had stored when it was killed is found by the one that searches meanwhile."""
    context = multiprocessing.get_context("spawn")
    retriever = Retriever(shelf, embedder)
    _put(shelf.catalog, 0)
    assert len(retriever.search("red fox", 100)) == 1
    writer = context.Process(
        target=_write_documents,
        args=(str(tmp_path / "store"), shelf.catalog.namespace, _put, 1, 40),
    )
    writer.start()
    seen = [1]
    while writer.is_alive():
        hits = retriever.search("red fox", 100)
        assert all(h.text == f"passage number{h.document_id[1:]} of the red fox" for h in hits)
        seen.append(len(hits))
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    assert seen == sorted(seen)
    for search in (retriever, Retriever(shelf, embedder)):
        assert len(search.search("red fox", 100)) == 41
        assert search.search("number17", 1)[0].document_id == "d17"
