"""Case tests, area T: every text is cut, in time, into pieces that are small enough, losing nothing."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkcache.errors import InvalidValueError
from chunkcache.identity import TenantNamespace
from chunkcache.model.tokenising import TextTokenizer
from chunkcache.planning import AskOptions
from chunkcache.splitting import DocumentSplitter, TextFormat
from chunkcache.testing import tiny_tokenizer_json

Caches = Callable[..., Any]
NAMESPACE = TenantNamespace(b"n" * 32)
TOKENIZER = TextTokenizer(tiny_tokenizer_json())


def _check(text: str, chunk_tokens: int, text_format: TextFormat = "text") -> list[int]:
    """Cut a text, check every promise, and return the chunks' sizes."""
    chunks = DocumentSplitter(TOKENIZER, chunk_tokens).split(text, NAMESPACE, text_format)
    assert "".join(text[c.start : c.end] for c in chunks) == text
    assert all(a.end == b.start for a, b in pairwise(chunks))
    for chunk in chunks:
        assert len(chunk.token_ids) <= chunk_tokens
        assert TOKENIZER.decode(chunk.token_ids) == text[chunk.start : chunk.end]
    return [len(c.token_ids) for c in chunks]


@pytest.mark.parametrize("chunk_tokens", [0, -1, 15, 4097, 10**9])
def test_T01_sizes_that_make_no_sense(open_cache: Caches, chunk_tokens: int) -> None:
    """A size that cannot work is refused at start, by name. There is no overlap to get wrong."""
    with pytest.raises(InvalidValueError) as caught:
        open_cache(chunk_tokens=chunk_tokens)
    assert caught.value.param == "chunk_tokens"
    with pytest.raises(InvalidValueError):
        open_cache(chunk_overlap=chunk_tokens)


@pytest.mark.parametrize("size", [16, 17, 24])
@pytest.mark.parametrize("short_by", [0, 1, 2])
def test_T01_sentences_about_as_long_as_a_chunk(size: int, short_by: int) -> None:
    """Sentences just as long as a chunk, or a little shorter, are cut and end."""
    words = size - short_by - 1
    sentence = "".join(f" {'qxzjvkw'[i % 7]}" for i in range(words // 2)) + " z" * (words % 2) + "."
    sizes = _check((sentence * 30).strip(), size)
    assert len(sizes) >= 5


def test_T02_metadata_is_no_text(open_cache: Caches, passages: dict[str, str]) -> None:
    """Metadata larger than any chunk changes neither chunks nor prompt."""
    cache = open_cache()
    plain = cache.put("tower", passages["tower"])
    metadata = {"notes": "PWNED " * 900, "depth": [[[["deep"]]]]}
    rich = cache.put("rich", passages["tower"], metadata)
    assert (rich.num_chunks, rich.num_tokens) == (plain.num_chunks, plain.num_tokens)
    assert rich.prefilled_chunks == 0
    assert cache.get("rich").metadata == metadata
    plans = [cache.plan("Who?", [name], AskOptions()) for name in ("tower", "rich")]
    assert plans[0].layout.token_ids == plans[1].layout.token_ids


@pytest.mark.parametrize(
    "text",
    ["a" * 200_000, "漢字仮名" * 8_000, "".join(chr(33 + i * 7 % 90) for i in range(60_000))],
    ids=["one letter", "one word of CJK", "one line of signs"],
)
def test_T03_text_without_a_place_to_cut(text: str) -> None:
    """A very long run without white space is cut like any other text."""
    assert len(_check(text, 64)) > 100


def _work_per_char(unit: str, num_chars: int) -> float:
    """Characters given to the tokenizer while a text of one repeated unit is cut, per character."""
    tokenizer = TextTokenizer(tiny_tokenizer_json())
    count_content = tokenizer.count_content
    num_encoded = 0

    def counted(text: str) -> int:
        nonlocal num_encoded
        num_encoded += len(text)
        return count_content(text)

    tokenizer.count_content = counted  # type: ignore[method-assign]
    text = "x" + unit * (num_chars // len(unit)) + "x"
    DocumentSplitter(tokenizer, 256).split(text, NAMESPACE)
    return num_encoded / len(text)


@pytest.mark.parametrize("unit", ["a", "ab ", "A sentence. ", "\n", "漢"], ids=ascii)
def test_T03_work_grows_with_the_length(unit: str) -> None:
    """Four times the text is about four times the work, also where it has no structure."""
    assert _work_per_char(unit, 8_000) < 1.6 * _work_per_char(unit, 2_000)


alphabet = st.sampled_from(
    [
        "a",
        "Word",
        " ",
        "\n",
        "\n\n",
        ". ",
        "# ",
        "```\n",
        "👨‍👩‍👧‍👦",
        "🇩🇪🇫🇷",
        "👍🏽",
        "e\u0301",
        "שָׁלוֹם",
        "العَرَبِيَّة",
        "\u200b",
        "漢",
        "\u202e",
        "|---|\n",
        "0123456789",
        "\x07",
    ]
)


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(alphabet, min_size=1, max_size=120),
    size=st.sampled_from([16, 23, 64]),
    text_format=st.sampled_from(["text", "markdown"]),
)
def test_T04_no_character_is_broken(parts: list[str], size: int, text_format: TextFormat) -> None:
    """Any mix of scripts, marks and joined emoji: pieces slice the text and join to it again."""
    _check("".join(parts), size, text_format)


@pytest.mark.parametrize("unit", ["👨‍👩‍👧‍👦", "🇩🇪", "a\u0301\u0327", "👍🏽", "نَّ"], ids=ascii)
def test_T04_long_runs_of_joined_characters(unit: str) -> None:
    """Thousands of them without a space: nothing is lost and no replacement character appears."""
    text = unit * 1_500
    chunks = DocumentSplitter(TOKENIZER, 256).split(text, NAMESPACE)
    assert "".join(text[c.start : c.end] for c in chunks) == text
    assert all("\ufffd" not in TOKENIZER.decode(c.token_ids) for c in chunks)
    assert max(len(c.token_ids) for c in chunks) <= 256


@settings(max_examples=30, deadline=None)
@given(size=st.integers(16, 40), num_pieces=st.integers(1, 6), rest=st.integers(0, 3))
def test_T05_pieces_that_fill_a_chunk_exactly(size: int, num_pieces: int, rest: int) -> None:
    """Chunks never overlap, also where a paragraph fills one to the last token.

    That is the documented behaviour: each character is in one chunk.
    """
    paragraph = " z" * (size - 1) + "\n"
    text = paragraph * num_pieces + " z" * rest
    tokens = TOKENIZER.count_content(paragraph)
    sizes = _check(text, tokens)
    assert max(sizes) <= tokens
