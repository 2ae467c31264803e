"""The retriever over a whole cache: real splitting, ingestion errors, and a question's plan."""

import pytest

from chunkcache.errors import EmptyDocumentError
from chunkcache.planning import AskOptions
from chunkcache.precache import TextItem
from chunkcache_retriever.retriever import Retriever
from chunkcache_retriever.testing import FixedEmbedder


@pytest.fixture
def cache(open_cache):
    return open_cache()


@pytest.fixture
def retriever(cache):
    return Retriever(cache, FixedEmbedder(max_tokens=16))


def test_hits_become_a_prompt(cache, retriever, passages):
    for document_id, text in passages.items():
        cache.put(document_id, text)
    refs = retriever.retrieve("Who keeps the key of the tower? The baker?", 3)
    assert refs[0].document_id == "tower"
    plan = cache.plan("Who?", refs, AskOptions(max_tokens=4))
    assert sum(len(r.chunk_indexes or ()) for r in refs) == len(plan.identities) == 3
    hits = retriever.search("the key is kept by the baker", 100)
    for hit in hits:
        assert cache.get(hit.document_id).text[hit.start : hit.end] == hit.text


def test_empty_texts_are_refused_one_by_one(cache, retriever):
    for text in ("", "   ", "\n\n", "\u200b"):
        with pytest.raises(EmptyDocumentError):
            cache.put("empty", text)
    assert cache.precache([]).documents == 0
    assert retriever.search("anything") == []


def test_a_batch_with_a_bad_item_leaves_the_rest_right(cache, retriever):
    texts = {f"d{i}": f"Document {i} speaks of animal{i} alone." for i in range(5)}
    items = [TextItem(d, "" if d == "d2" else text) for d, text in texts.items()]
    summary = cache.precache([*items, TextItem("d0", texts["d0"]), TextItem("", "no id")])
    assert (summary.created, len(summary.failures)) == (4, 2)
    texts |= {"d5": "Document 5 speaks of animal5.", "d6": "Document 6 speaks of animal6."}
    for document_id in ("d5", "d6"):
        cache.put(document_id, texts[document_id])
    for i in (0, 1, 3, 4, 5, 6):
        hit = retriever.search(f"animal{i}", 1)[0]
        assert hit.document_id == f"d{i}"
        assert f"animal{i}" in hit.text
    assert {h.document_id for h in retriever.search("Document", 100)} == texts.keys() - {"d2"}


def test_one_paragraph_in_two_files(cache, retriever, passages):
    shared = passages["bridge"].split(". ")[0] + "."
    cache.put("one", f"{shared}\n\n{passages['harbour']}")
    cache.put("two", f"{passages['tower']}\n\n{shared}")
    hits = retriever.search("When was the bridge over the river Alm built?", 3)
    assert len(hits) == 3
    assert len({" ".join(h.text.split()) for h in hits}) == 3
    assert {hits[0].document_id, *(d for d, _ in hits[0].also_in)} == {"one", "two"}


def test_deleted_and_replaced_text_is_not_found(cache, retriever, passages):
    cache.put("d", passages["tower"])
    assert any("4017" in h.text for h in retriever.search("the door code is 4017", 9))
    cache.put("d", passages["bridge"])
    cache.put("e", passages["harbour"])
    assert not any("4017" in h.text for h in retriever.search("the door code is 4017", 9))
    cache.delete("d")
    assert {h.document_id for h in retriever.search("bridge", 9)} == {"e"}
