"""Inexact forms of the vector index: they find what the flat one finds, and nothing that is gone."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from chunkcache.errors import InvalidValueError
from chunkcache.identity import ChunkId
from chunkcache_retriever import index as index_module
from chunkcache_retriever.index import ChunkIndex
from chunkcache_retriever.index_form import MAX_FLAT_VECTORS, IndexForm, form_for
from chunkcache_retriever.retriever import Retriever

DIM = 16
FORMS = ("HNSW16", "IVF8,Flat")
NUM_CHUNKS = 500


def name(i: int) -> ChunkId:
    return ChunkId(i.to_bytes(32, "big"))


def row(i: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(i).standard_normal((1, DIM)).astype(np.float32)


def filled(factory: str | None, numbers: Sequence[int]) -> ChunkIndex:
    index = ChunkIndex(DIM, factory)
    index.add({name(i): row(i) for i in numbers})
    return index


@pytest.mark.parametrize("factory", FORMS)
def test_it_finds_what_the_flat_one_finds(factory: str) -> None:
    flat, other = (filled(f, range(NUM_CHUNKS)) for f in ("Flat", factory))
    assert (other.form.factory, other.num_vectors, len(other)) == (factory, NUM_CHUNKS, NUM_CHUNKS)
    num_shared = 0
    for i in range(40):
        wanted, found = (x.search(row(i + 10_000), 10) for x in (flat, other))
        assert len(found) == 10
        assert [s.score for s in found] == sorted((s.score for s in found), reverse=True)
        num_shared += len({s.chunk_id for s in wanted} & {s.chunk_id for s in found})
        scores = {s.chunk_id: s.score for s in wanted}
        for scored in found:
            exact = scores.get(scored.chunk_id)
            assert exact is None or scored.score == pytest.approx(exact, abs=1e-5)
    assert num_shared > 0.9 * 400
    vectors = other.vectors_of(name(3))
    assert vectors is not None
    np.testing.assert_allclose(vectors, row(3) / np.linalg.norm(row(3)), atol=1e-6)


@pytest.mark.parametrize("factory", FORMS)
def test_what_is_gone_is_never_found(factory: str) -> None:
    index = filled(factory, range(NUM_CHUNKS))
    index.remove(name(i) for i in range(100))
    index.add({name(200): row(20_000)})
    assert (len(index), index.num_vectors) == (NUM_CHUNKS - 100, NUM_CHUNKS - 100)
    live = {name(i) for i in range(100, NUM_CHUNKS)}
    for i in range(0, 250, 7):
        found = {s.chunk_id for s in index.search(row(i), 20)}
        assert len(found) == 20
        assert found <= live
    assert index.search(row(20_000), 1)[0].chunk_id == name(200)
    assert index.search(row(200), 1)[0].score < 0.99
    index.remove(name(i) for i in range(100, 400))
    assert index._state.num_dead == 0  # too many: it was built anew
    everything = {s.chunk_id for s in index.search(row(450), 1_000)}
    assert everything <= {name(i) for i in range(400, NUM_CHUNKS)}
    index.remove(list(index.chunk_ids()))
    assert index.search(row(1), 5) == []


@pytest.mark.parametrize("max_compared", [1_000, 0])
@pytest.mark.parametrize("factory", FORMS)
def test_filters_keep_to_what_they_leave(
    factory: str, max_compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "MAX_COMPARED", max_compared)
    index = filled(factory, range(NUM_CHUNKS))
    among = [name(i) for i in range(0, NUM_CHUNKS, 5)]
    found = index.search(row(10), 5, among)
    assert found[0].chunk_id == name(10)
    assert {s.chunk_id for s in found} <= set(among)
    assert index.search(row(10), 5, []) == []
    assert len(index.search(row(10), 1_000, among[:3])) <= 3


def test_several_vectors_of_a_chunk_count_by_the_best() -> None:
    index = ChunkIndex(DIM, "HNSW16")
    index.add({name(i): np.concatenate([row(i), row(i + 1_000)]) for i in range(200)})
    for i in (3, 1_003):
        (best,) = index.search(row(i), 1)
        assert (best.chunk_id, best.score) == (name(3), pytest.approx(1.0, abs=1e-5))


def test_cells_wait_for_enough_vectors() -> None:
    index = filled("IVF8,Flat", range(100))
    assert index.form == IndexForm("Flat")
    index.add({name(i): row(i) for i in range(100, 400)})
    assert index.form == IndexForm("IVF8,Flat")
    index.remove(name(i) for i in range(300))
    assert index.form == IndexForm("Flat")
    assert index.search(row(350), 1)[0].chunk_id == name(350)


def test_the_form_follows_the_number_where_none_is_set() -> None:
    assert form_for(MAX_FLAT_VECTORS, None) == IndexForm("Flat")
    assert form_for(MAX_FLAT_VECTORS + 1, None).num_cells > 0
    assert form_for(10, "HNSW32") == IndexForm("HNSW32")


@pytest.mark.parametrize("factory", ["", "flat", "PQ8", "IVF8,PQ4", "HNSW0", "IVF0,Flat", "Flat;x"])
def test_other_forms_are_refused(factory: str, shelf, embedder) -> None:
    if factory:
        with pytest.raises(InvalidValueError, match="index_factory"):
            Retriever(shelf, embedder, index_factory=factory)
    with pytest.raises(InvalidValueError):
        IndexForm(factory)


@pytest.mark.parametrize("factory", ["Flat", *FORMS])
def test_a_retriever_over_every_form(factory: str, shelf, embedder, texts_of) -> None:
    shelf.put("a", "the crane is green", "the lamp is lit at dusk")
    shelf.put("b", "the gate is blue")
    retriever = Retriever(shelf, embedder, "dense", index_factory=factory)
    assert texts_of(retriever, "green crane", 1) == ["the crane is green"]
    shelf.delete("a")
    assert texts_of(retriever, "green crane", 3) == ["the gate is blue"]
