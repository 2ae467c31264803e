"""Long texts: every part is embedded, none twice as much as it needs."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkcache.errors import InvalidValueError, ModelError
from chunkcache_retriever.embedder import embed_all, embed_long, text_windows
from chunkcache_retriever.testing import FixedEmbedder

WORDS = st.lists(st.text("abcdefgh", min_size=1, max_size=6), max_size=120)


@given(words=WORDS, max_tokens=st.integers(1, 40))
def test_windows_cover_the_text_and_fit(words, max_tokens):
    embedder = FixedEmbedder(max_tokens=max_tokens)
    numbered = [f"{word}{i}" for i, word in enumerate(words)]
    text = " \n".join(numbered)
    windows = text_windows(embedder, text)
    if not words:
        assert windows == []
        return
    if len(words) <= max_tokens:
        assert windows == [text]
    assert all(window in text for window in windows)
    assert all(len(embedder.token_spans(window)) <= max_tokens for window in windows)
    seen = [re.findall(r"\w+", window) for window in windows]
    assert {word for window in seen for word in window} == set(numbered)
    starts = [numbered.index(window[0]) for window in seen]
    assert starts == sorted(set(starts))
    # At least three quarters of each window's room goes to what the one before did not hold.
    assert len(windows) <= 1 + -(-len(words) // max(1, 3 * max_tokens // 4))


def test_neighbours_overlap():
    embedder = FixedEmbedder(max_tokens=32)
    windows = text_windows(embedder, " ".join(f"w{i}" for i in range(100)))
    seen = [set(window.split()) for window in windows]
    assert all(len(a & b) >= 3 for a, b in itertools.pairwise(seen))


class LettersWhenCut(FixedEmbedder):
    """A word that is known whole is one token; any part of it is a token per letter."""

    def token_spans(self, text):
        spans = []
        for word in re.finditer(r"\w+", text):
            step = 4 if len(word[0]) % 4 == 0 else 1
            spans += [(i, min(i + step, word.end())) for i in range(*word.span(), step)]
        return spans


def test_a_piece_with_more_tokens_alone_is_cut_again():
    embedder = LettersWhenCut(max_tokens=8)
    text = "abcd" * 20 + "xyz"
    windows = text_windows(embedder, text)
    assert all(len(embedder.token_spans(window)) <= 8 for window in windows)
    position = 0
    for window in windows:
        position = max(position, text.index(window, max(0, position - len(window))) + len(window))
    assert position == len(text)


def test_vectors_of_several_texts_stay_with_their_texts():
    embedder = FixedEmbedder(max_tokens=8)
    long = " ".join(f"w{i}" for i in range(30))
    batch = ["alpha beta", "", long, "?!", "gamma"]
    together = embed_all(embedder, batch)
    for text, rows in zip(batch, together, strict=True):
        assert np.array_equal(rows, np.reshape(embed_long(embedder, text), (-1, embedder.dim)))
    assert [len(rows) for rows in together][:2] == [1, 0]
    assert len(together[2]) > 3
    assert embed_all(embedder, []) == []


def test_an_embedder_that_lies_about_its_width_is_found_out():
    embedder = FixedEmbedder(dim=64)
    embedder.dim, embedder.embed = 32, FixedEmbedder(dim=64).embed
    with pytest.raises(ModelError, match=r"32.*64"):
        embed_long(embedder, "a word")


def test_a_text_is_never_cut_silently():
    with pytest.raises(InvalidValueError, match=r"9 words, over 8"):
        FixedEmbedder(max_tokens=8).embed(["w " * 9])
