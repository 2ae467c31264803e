"""Searching while documents come and go, and in a forked child."""

import os
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

from chunkcache.errors import StoreError
from chunkcache_retriever.retriever import Retriever

NUM_ADDED = 60
NUM_DELETED = 30
NUM_SEARCHES = 40


def test_hits_are_live_while_documents_come_and_go(shelf, retriever):
    for i in range(NUM_DELETED):
        shelf.put(f"old{i}", f"common word old{i}", "shared passage")
    for i in range(5):
        shelf.put(f"kept{i}", f"common word kept{i}")
    deleted: set[str] = set()

    def add() -> None:
        for i in range(NUM_ADDED):
            shelf.put(f"new{i}", f"common word new{i}", "shared passage")

    def delete() -> None:
        for i in range(NUM_DELETED):
            shelf.delete(f"old{i}")
            deleted.add(f"old{i}")

    def search(worker: int) -> None:
        for i in range(NUM_SEARCHES):
            gone_before = frozenset(deleted)
            kept = f"kept{(worker + i) % 5}"
            assert retriever.search(kept, 1)[0].text == f"common word {kept}"
            for hit in retriever.search("common word", 50):
                assert hit.document_id not in gone_before
                assert not {d for d, _ in hit.also_in} & gone_before
                assert hit.text in (f"common word {hit.document_id}", "shared passage")

    with ThreadPoolExecutor(6) as pool:
        for task in [pool.submit(search, w) for w in range(4)] + [
            pool.submit(add),
            pool.submit(delete),
        ]:
            task.result()
    hits = retriever.search("common word", 1_000)
    expected = {f"common word new{i}" for i in range(NUM_ADDED)}
    expected |= {f"common word kept{i}" for i in range(5)} | {"shared passage"}
    assert {h.text for h in hits} == expected
    assert len(hits) == len(expected) == retriever.sync().num_vectors


def test_a_document_that_goes_during_a_search_is_left_out(shelf, embedder, monkeypatch):
    for name in ("a", "b", "c"):
        shelf.put(name, f"word {name}", "shared")
    retriever = Retriever(shelf, embedder)
    retriever.sync()
    read = shelf.catalog.get_many
    is_first = True

    def delete_and_read(document_ids):
        nonlocal is_first
        if is_first:
            is_first = False
            shelf.catalog.delete("a")
        return read(document_ids)

    monkeypatch.setattr(shelf.catalog, "get_many", delete_and_read)
    hits = retriever.search("shared word", 9)
    assert {h.text for h in hits} == {"shared", "word b", "word c"}
    assert not {"a"} & {d for h in hits for d in (h.document_id, *(p[0] for p in h.also_in))}


def test_threads_embed_what_is_new_once(shelf, retriever, embedder):
    shelf.put("d", *(f"passage{i}" for i in range(50)))
    start = threading.Barrier(4)

    def sync() -> int:
        start.wait()
        return retriever.sync().generation

    with ThreadPoolExecutor(4) as pool:
        assert {pool.submit(sync) for _ in range(4)}
    assert embedder.num_embedded == 50


def test_a_forked_child_is_told_to_open_its_own(shelf, retriever, embedder):
    shelf.put("d", "alpha")
    assert retriever.search("alpha")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            embedder.embed = None  # a real one would hang
            retriever.search("alpha")
        except StoreError as error:
            code = 0 if "fork" in error.message else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
