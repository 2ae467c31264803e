"""The index of words: its ranking, changes, and what stays of what was removed."""

import math
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkcache.identity import ChunkId
from chunkcache_retriever.word_index import K1, B, WordIndex
from chunkcache_retriever.words import words_of


def name(number: int) -> ChunkId:
    return ChunkId(bytes([number]) * 32)


def found(index: WordIndex, query: str, k: int = 10) -> list[int]:
    return [scored.chunk_id[0] for scored in index.search(query, k)]


def test_scores_are_those_of_the_formula() -> None:
    """Lucene's BM25: idf * tf / (tf + k1 * (1 - b + b * length / mean length))."""
    texts = {1: "fox fox hound", 2: "fox", 3: "whale song of whale"}
    index = WordIndex()
    index.update({name(i): text for i, text in texts.items()})
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    lengths = {i: len(words_of(text)) for i, text in texts.items()}
    mean = sum(lengths.values()) / 3

    def score(i: int, tf: int) -> float:
        return idf * tf / (tf + K1 * (1 - B + B * lengths[i] / mean))

    scores = {s.chunk_id[0]: s.score for s in index.search("Fox", 9)}
    assert scores == pytest.approx({1: score(1, 2), 2: score(2, 1)}, rel=1e-5)


def test_common_words_do_not_count() -> None:
    assert words_of("What are the Controllers controlling?") == ["controllers", "controlling"]
    assert words_of("of the") == []
    assert words_of("E-42 naïve") == ["e", "42", "naïve"]


def test_scripts_without_spaces_are_searched_in_pairs() -> None:
    index = WordIndex()
    index.update({name(1): "东京都的天气预报", name(2): "大阪府的新闻"})
    assert found(index, "天气") == [1]
    assert words_of("好") == ["好"]


def test_nothing_shared_is_nothing_found() -> None:
    index = WordIndex()
    assert found(index, "fox") == []
    index.update({name(1): "...", name(2): "fox"})
    assert found(index, "whale") == []
    assert found(index, "the") == []
    assert found(index, "fox") == [2]
    assert len(index) == 2


def test_equal_ones_come_in_the_order_of_their_ids() -> None:
    index = WordIndex()
    index.update({name(i): "fox" for i in (7, 3, 5)})
    assert found(index, "fox") == [3, 5, 7]
    assert found(index, "fox", 2) == [3, 5]


def test_among() -> None:
    index = WordIndex()
    index.update({name(i): f"fox {'x ' * i}" for i in range(1, 5)})
    assert [s.chunk_id[0] for s in index.search("fox", 9, {name(4), name(2), name(9)})] == [2, 4]
    assert index.search("fox", 9, set()) == []


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["", "fox", "fox whale", "whale song song"])),
        max_size=12,
    )
)
def test_changes_end_like_one_build(changes: list[tuple[int, str]]) -> None:
    """Whatever came and went, the index is that of what is there; no word of the rest is left."""
    index, texts = WordIndex(), {}
    for number, text in changes:
        if text:
            texts[number] = text
            index.update({name(number): text})
        else:
            texts.pop(number, None)
            index.update({}, remove=[name(number)])
    fresh = WordIndex()
    fresh.update({name(i): text for i, text in texts.items()})
    for query in ("fox", "whale", "song fox"):
        assert index.search(query, 9) == fresh.search(query, 9)
    assert set(index._state.vocabulary) == {w for t in texts.values() for w in words_of(t)}


def test_searches_during_changes_see_whole_states() -> None:
    index = WordIndex()
    index.update({name(1): "fox"})
    faults: list[BaseException] = []
    stop = threading.Event()

    def search() -> None:
        try:
            while not stop.is_set():
                assert found(index, "fox") == [1]
                assert found(index, "whale0 fox whale29")[-1] in (1, 2)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(30):
        index.update({name(2): f"whale{i}"})
    stop.set()
    for thread in threads:
        thread.join()
    assert faults == []
