"""Case tests, area F: what a search finds is there, is its own text, and is found once."""

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from chunkcache.errors import EmptyDocumentError, InvalidValueError, StoreError
from chunkcache_retriever.retriever import Retriever
from chunkcache_retriever.testing import FixedEmbedder

Caches = Callable[..., Any]
ANIMALS = ["zebra", "whale", "hound", "crab", "fox", "newt", "owl", "pike", "stork", "toad"]


def put_all(cache: Any, animals: list[str]) -> None:
    for animal in animals:
        cache.put(animal, f"The {animal} lives here.")


def first(retriever: Retriever, query: str) -> str:
    return retriever.search(query, 1)[0].text


def test_F01_more_results_than_there_are(open_cache: Caches) -> None:
    """Three chunks are three results, however many are asked for; no number stands for none."""
    cache = open_cache()
    put_all(cache, ANIMALS[:3])
    retriever = Retriever(cache, FixedEmbedder())
    assert len(retriever.search("The zebra", 10)) == 3
    for top_k in (0, -1, 10**9):
        with pytest.raises(InvalidValueError) as caught:
            retriever.search("The zebra", top_k)
        assert caught.value.param == "top_k"


def test_F03_the_same_document_again(open_cache: Caches) -> None:
    """Putting a document again adds nothing; a new text takes the place of the old one."""
    cache = open_cache()
    retriever = Retriever(cache, FixedEmbedder())
    for _ in range(3):
        cache.put("d", "The zebra lives here.")
        assert retriever.sync().num_vectors == 1
    cache.put("d", "A whale swims there.")
    assert [h.text for h in retriever.search("zebra whale", 9)] == ["A whale swims there."]


def test_F04_ids_are_not_used_again(open_cache: Caches) -> None:
    """After deletions and additions each text is found under its own document, no deleted one."""
    cache = open_cache()
    retriever = Retriever(cache, FixedEmbedder())
    put_all(cache, ANIMALS[:6])
    retriever.sync()
    for animal in ANIMALS[:6:2]:
        cache.delete(animal)
    put_all(cache, ANIMALS[6:])
    alive = ANIMALS[1:6:2] + ANIMALS[6:]
    for animal in alive:
        hit = retriever.search(f"The {animal}", 1)[0]
        assert (hit.document_id, hit.text) == (animal, f"The {animal} lives here.")
    assert {h.document_id for h in retriever.search("lives here", 99)} == set(alive)


def test_F05_a_batch_with_a_bad_item(open_cache: Caches) -> None:
    """Bad items are reported; what is found afterwards matches its text."""
    from chunkcache.precache import TextItem

    cache = open_cache()
    items = [TextItem(animal, f"The {animal} lives here.") for animal in ANIMALS[:5]]
    items[2] = TextItem("bad", "text", {"x": float("nan")})
    summary = cache.precache([*items, TextItem("", "text"), TextItem("empty", " ")])
    assert [f.code for f in summary.failures] == [
        "invalid_value",
        "invalid_value",
        "empty_document",
    ]
    put_all(cache, ANIMALS[5:7])
    retriever = Retriever(cache, FixedEmbedder())
    for animal in ANIMALS[:2] + ANIMALS[3:7]:
        assert first(retriever, f"The {animal}") == f"The {animal} lives here."


def test_F06_places_after_a_deletion(open_cache: Caches) -> None:
    cache = open_cache()
    retriever = Retriever(cache, FixedEmbedder())
    put_all(cache, ANIMALS[:5])
    retriever.sync()
    cache.delete(ANIMALS[0])
    hit = retriever.search("fox", 1)[0]
    assert (hit.document_id, hit.text) == ("fox", "The fox lives here.")


class FaultyEmbedder(FixedEmbedder):
    """Gives no sound vector for some texts."""

    def embed(self, texts, *, is_query=False):
        rows = super().embed(texts, is_query=is_query)
        for row, text in zip(rows, texts, strict=True):
            for word, value in (("zebra", np.nan), ("whale", np.inf), ("hound", 0.0)):
                if word in text:
                    row[:] = value
        return rows


def test_F07_vectors_that_are_no_numbers(open_cache: Caches) -> None:
    """Such chunks are reported and not found; neither are questions; the others are."""
    cache = open_cache()
    put_all(cache, ANIMALS[:5])
    retriever = Retriever(cache, FaultyEmbedder())
    report = retriever.sync()
    assert sorted(report.not_indexed.values()) == [
        "embedding is not finite",
        "embedding is not finite",
        "embedding is zero",
    ]
    assert {h.document_id for h in retriever.search("lives here", 9)} == {"crab", "fox"}
    with pytest.raises(InvalidValueError) as caught:
        retriever.search("the zebra")
    assert caught.value.param == "query"


def test_F08_another_embedder(open_cache: Caches) -> None:
    """Vectors are an embedder's own, whatever their width: another one embeds everything anew."""
    cache = open_cache()
    put_all(cache, ANIMALS[:4])
    assert Retriever(cache, FixedEmbedder(dim=64)).sync().num_embedded == 4
    assert Retriever(cache, FixedEmbedder(dim=64)).sync().num_embedded == 0
    for other in (FixedEmbedder(dim=128), FixedEmbedder(dim=64, name="other")):
        retriever = Retriever(cache, other)
        assert retriever.sync().num_embedded == 4
        assert first(retriever, "The crab") == "The crab lives here."


def test_F09_searches_during_changes(open_cache: Caches) -> None:
    """Every result is a text that was there when the search began or ended."""
    cache = open_cache()
    put_all(cache, ANIMALS)
    retriever = Retriever(cache, FixedEmbedder())
    retriever.sync()
    faults: list[BaseException] = []
    stop = threading.Event()

    def search() -> None:
        try:
            while not stop.is_set():
                for hit in retriever.search("lives here", 50):
                    assert hit.text == f"The {hit.document_id} lives here."
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(12):
        put_all(cache, [f"beast{i}"])
        cache.delete(f"beast{i}" if i % 2 else ANIMALS[i // 2])
    stop.set()
    for thread in threads:
        thread.join()
    assert faults == []


def test_F10_a_forked_child_is_told(open_cache: Caches) -> None:
    """A child with its parent's retriever gets an error at once; it does not hang."""
    cache = open_cache()
    put_all(cache, ANIMALS[:2])
    retriever = Retriever(cache, FixedEmbedder())
    retriever.search("zebra")
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def search() -> None:
        try:
            answers.put(len(retriever.search("zebra")))
        except StoreError as error:
            answers.put(error.code)

    child = context.Process(target=search)
    child.start()
    child.join(10)
    assert child.exitcode == 0
    assert isinstance(answers.get(), str)


def test_F11_the_end_of_a_long_chunk_is_found(open_cache: Caches) -> None:
    """A chunk with many times the tokens that the embedder reads at once is found by its end."""
    cache = open_cache(chunk_tokens=256)
    filler = " ".join(f"word{i % 7}" for i in range(60))
    cache.put("long", f"{filler} and the quetzal sits at the end")
    cache.put("other", "Something else altogether.")
    for ranking in ("dense", "hybrid", "bm25"):
        retriever = Retriever(cache, FixedEmbedder(max_tokens=8), ranking)
        hit = retriever.search("quetzal sits at the end", 1)[0]
        assert (hit.document_id, "quetzal" in hit.text) == ("long", True)


def test_F13_texts_without_anything(open_cache: Caches) -> None:
    """Nothing to embed is refused by name, or reported; no documents are no error."""
    cache = open_cache()
    retriever = Retriever(cache, FixedEmbedder())
    assert retriever.search("zebra") == []
    assert cache.precache([]).documents == 0
    for text in ("", "   ", "\n\n", "\u200b"):
        with pytest.raises(EmptyDocumentError):
            cache.put("d", text)
        with pytest.raises(InvalidValueError):
            retriever.search(text)
    cache.put("signs", "--- *** ---")
    assert retriever.sync().not_indexed
    assert retriever.search("zebra") == []


def test_F14_one_passage_in_two_documents(open_cache: Caches) -> None:
    """It takes one place among the results, and both documents can be cited."""
    cache = open_cache()
    put_all(cache, ANIMALS[:3])
    cache.put("copy", "The zebra lives here.")
    hits = Retriever(cache, FixedEmbedder()).search("The zebra lives here", 3)
    assert sorted(h.text for h in hits) == sorted(f"The {a} lives here." for a in ANIMALS[:3])
    assert (hits[0].document_id, hits[0].also_in) == ("copy", (("zebra", 0),))


def test_F15_a_shorter_version(open_cache: Caches) -> None:
    """What only the former version held is not found, and its entries are gone."""
    cache = open_cache(chunk_tokens=16)
    retriever = Retriever(cache, FixedEmbedder())
    long = "\n\n".join(f"Paragraph {a} tells of the {a} at length." for a in ANIMALS)
    cache.put("d", long)
    assert "toad" in first(retriever, "toad")
    cache.put("d", "\n\n".join(long.split("\n\n")[:4]))
    num_chunks = len({c.chunk_id for c in cache.get("d").chunks})
    assert all("toad" not in h.text for h in retriever.search("toad", 99))
    assert retriever.sync().num_chunks == num_chunks
