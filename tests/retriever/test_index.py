"""The vector index alone: ids, removal, faults, threads, forks."""

import os
import signal
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import faiss
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkcache.errors import InvalidValueError
from chunkcache.identity import ChunkId
from chunkcache_retriever.index import ChunkIndex

DIM = 16


def name(i: int) -> ChunkId:
    return ChunkId(i.to_bytes(32, "big"))


def row(i: int, dim: int = DIM) -> npt.NDArray[np.float32]:
    """A direction of its own for each number."""
    vector = np.random.default_rng(i).standard_normal((1, dim)).astype(np.float32)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def filled(*numbers: int) -> ChunkIndex:
    index = ChunkIndex(DIM)
    index.add({name(i): row(i) for i in numbers})
    return index


def found(index: ChunkIndex, i: int, k: int = 1) -> list[ChunkId]:
    return [s.chunk_id for s in index.search(row(i), k)]


def test_an_empty_index_finds_nothing():
    index = ChunkIndex(DIM)
    assert index.search(row(0), 3) == []
    assert (len(index), index.num_vectors, index.chunk_ids()) == (0, 0, frozenset())


def test_asking_for_more_than_there_is_gives_all():
    index = filled(0, 1, 2)
    for k in (3, 10, 10**9):
        hits = index.search(row(1), k)
        assert {h.chunk_id for h in hits} == {name(0), name(1), name(2)}
        assert hits[0].chunk_id == name(1)
        assert hits[0].score == pytest.approx(1.0, abs=1e-6)
        assert [h.score for h in hits] == sorted((h.score for h in hits), reverse=True)


@pytest.mark.parametrize("k", [0, -1, -(10**9)])
def test_asking_for_none_is_refused(k):
    with pytest.raises(InvalidValueError, match="top_k") as caught:
        filled(0).search(row(0), k)
    assert caught.value.param == "top_k"


def test_adding_a_chunk_again_replaces_it():
    index = filled(0, 1)
    for _ in range(3):
        index.add({name(0): row(0)})
    assert (len(index), index.num_vectors) == (2, 2)
    index.add({name(0): row(7)})
    assert index.num_vectors == 2
    assert found(index, 7) == [name(0)]
    assert index.search(row(0), 1)[0].score < 0.99


def test_numbers_are_not_used_twice_after_removals():
    index = filled(*range(10))
    index.remove(name(i) for i in range(1, 10, 2))
    index.add({name(i): row(i) for i in range(10, 15)})
    live = [*range(0, 10, 2), *range(10, 15)]
    assert index.chunk_ids() == {name(i) for i in live}
    for i in live:
        assert found(index, i) == [name(i)]
    everything = found(index, 3, 100)
    assert len(everything) == len(set(everything)) == len(live)
    assert not {name(i) for i in range(1, 10, 2)} & set(everything)


def test_removing_the_first_leaves_the_others_their_names():
    index = filled(*range(5))
    index.remove([name(0), name(99)])
    assert [found(index, i) for i in range(1, 5)] == [[name(i)] for i in range(1, 5)]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.integers(1, 3)), max_size=30))
def test_any_history_leaves_what_a_dictionary_would(history):
    index, expected = ChunkIndex(DIM), {}
    for is_add, i, num_windows in history:
        if is_add:
            rows = np.concatenate([row(100 * i + w) for w in range(num_windows)])
            index.add({name(i): rows})
            expected[name(i)] = rows
        else:
            index.remove([name(i)])
            expected.pop(name(i), None)
    assert index.chunk_ids() == expected.keys()
    assert index.num_vectors == sum(len(rows) for rows in expected.values())
    hits = index.search(row(3), 100)
    scores = {c: float((rows @ row(3)[0]).max()) for c, rows in expected.items()}
    assert {h.chunk_id: h.score for h in hits} == pytest.approx(scores, abs=1e-5)


def test_an_error_in_a_batch_changes_nothing():
    index = filled(0, 1)
    batch = {name(i): row(i) for i in range(2, 7)} | {name(4): row(4, DIM + 1)}
    with pytest.raises(InvalidValueError, match=rf"{DIM + 1}.*{DIM}"):
        index.update(batch, remove=[name(0)])
    assert index.chunk_ids() == {name(0), name(1)}
    index.add({name(8): row(8), name(9): row(9)})
    assert [found(index, i) for i in (0, 1, 8, 9)] == [[name(i)] for i in (0, 1, 8, 9)]


def test_vectors_that_are_none_are_reported_and_left_out():
    index = filled(0, 5)
    bad = np.full((1, DIM), np.nan, np.float32)
    infinite = row(2).copy()
    infinite[0, 3] = np.inf
    second_window = np.concatenate([row(5), np.zeros((1, DIM), np.float32)])
    batch = {name(1): bad, name(2): infinite, name(5): second_window, name(6): row(6)}
    faults = index.add(batch)
    assert {c: fault.split()[-1] for c, fault in faults.items()} == {
        name(1): "finite",
        name(2): "finite",
        name(5): "zero",
    }
    assert index.chunk_ids() == {name(0), name(6)}
    for query in (bad, infinite, np.zeros((1, DIM), np.float32)):
        with pytest.raises(InvalidValueError) as caught:
            index.search(query, 1)
        assert caught.value.param == "query"
    assert found(index, 6) == [name(6)]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_length_of_a_vector_does_not_matter(scale):
    index = ChunkIndex(DIM)
    index.add({name(0): row(0) * np.float32(scale), name(1): row(1)})
    assert index.search(row(0) * np.float32(scale), 1)[0].score == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("shape", [(DIM,), (1, DIM + 1), (0, DIM), (1, 1, DIM)])
def test_another_width_is_refused_with_both_numbers(shape):
    index = filled(0)
    with pytest.raises(InvalidValueError, match=str(DIM)):
        index.search(np.ones(shape, np.float32), 1)
    with pytest.raises(InvalidValueError, match=str(DIM)):
        index.add({name(1): np.ones(shape, np.float32)})


def test_a_chunk_of_many_windows_takes_one_place():
    index = filled(0, 1, 2)
    noise = np.concatenate([row(1_000 + w) for w in range(40)])
    index.add({name(9): (row(50) + noise / 10).astype(np.float32)})
    hits = [s.chunk_id for s in index.search(row(50), 3)]
    assert hits[0] == name(9)
    assert len(set(hits)) == 3
    both = index.search(np.concatenate([row(0), row(1)]), 2)
    assert {s.chunk_id for s in both} == {name(0), name(1)}
    assert [s.score for s in both] == pytest.approx([1.0, 1.0], abs=1e-6)


def test_equal_scores_come_in_order_of_ids_however_they_were_added():
    for order in ([3, 1, 2, 0], [0, 1, 2, 3]):
        index = ChunkIndex(DIM)
        for i in order:
            index.add({name(i): row(7)})
        assert found(index, 7, 2) == [name(0), name(1)]


def test_searching_while_others_change_the_index():
    index = filled(*range(100))
    steady = range(0, 100, 2)

    def change_others() -> None:
        for i in range(1, 100, 2):
            index.remove([name(i)])
            index.add({name(1_000 + i): row(1_000 + i)})

    def search_steady() -> bool:
        return all(found(index, i) == [name(i)] for i in steady for _ in range(3))

    with ThreadPoolExecutor(5) as pool:
        changes = [pool.submit(change_others)]
        searches = [pool.submit(search_steady) for _ in range(4)]
        assert all(s.result() for s in searches)
        changes[0].result()
    expected = {name(i) for i in steady} | {name(1_000 + i) for i in range(1, 100, 2)}
    assert index.chunk_ids() == expected


def in_child(body: Callable[[], bool]) -> int:
    """Exit code of a forked child: 0 if the body says yes; killed by a signal if it hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            code = 0 if body() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_search_and_change_in_a_forked_child():
    index = filled(*range(50))
    many = np.concatenate([row(i) for i in range(256)])
    plain = faiss.IndexFlatIP(DIM)
    plain.add(many)
    plain.search(many, 3)  # starts the threads that a child will lack
    assert found(index, 3) == [name(3)]

    def child() -> bool:
        index.update({name(77): row(77)}, remove=[name(0)])
        return found(index, 77) == [name(77)] and found(index, 3) == [name(3)]

    index._lock().acquire()  # as if another thread were changing it
    try:
        assert in_child(child) == 0
    finally:
        index._lock().release()
    assert name(77) not in index


def test_the_caller_keeps_its_number_of_threads():
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(2)
    try:
        found(filled(0), 0)
        assert faiss.omp_get_max_threads() == 2
    finally:
        faiss.omp_set_num_threads(before)
