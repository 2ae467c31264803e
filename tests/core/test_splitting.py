"""Cutting loses nothing, keeps to its limit, and ends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkcache.errors import InvalidValueError
from chunkcache.identity import TenantNamespace
from chunkcache.model.tokenising import TextTokenizer
from chunkcache.splitting import DocumentSplitter, format_of_fingerprint
from chunkcache.testing import tiny_tokenizer_json

TOKENIZER = TextTokenizer(tiny_tokenizer_json())
NAMESPACE = TenantNamespace(b"n" * 32)
SPLITTER = DocumentSplitter(TOKENIZER, 32)

texts = st.text(alphabet=st.characters(codec="utf-8"), min_size=1, max_size=400)
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"


def _check(text: str, limit: int = 32) -> None:
    chunks = DocumentSplitter(TOKENIZER, limit).split(text, NAMESPACE)
    assert "".join(text[c.start : c.end] for c in chunks) == text
    assert all(0 < len(c.token_ids) <= limit for c in chunks)
    for chunk in chunks:
        assert TOKENIZER.decode(chunk.token_ids) == text[chunk.start : chunk.end]


@settings(deadline=None)
@given(texts, st.sampled_from(["text", "markdown"]))
def test_chunks_join_to_the_text(text: str, text_format: str) -> None:
    chunks = SPLITTER.split(text, NAMESPACE, text_format)  # type: ignore[arg-type]
    assert "".join(text[c.start : c.end] for c in chunks) == text


@pytest.mark.parametrize(
    "text",
    [
        "a" * 50_000,
        "\u6f22" * 5_000,
        FAMILY * 500,
        "\u0627\u0644\u0639\u0650 \u05e9\u05b8\u05dc\u05d5\u05b9\u05dd " * 300,
        "\U0001f1e9\U0001f1ea" * 300,
        "x" * 3_000 + "\n\n" + "y" * 10,
    ],
    ids=["one letter", "ideographs", "families", "marks", "flags", "run and rest"],
)
def test_hard_texts_end_and_lose_nothing(text: str) -> None:
    _check(text)


def test_a_character_of_several_code_points_stays_whole() -> None:
    for chunk in SPLITTER.split(FAMILY * 800, NAMESPACE):
        assert (chunk.end - chunk.start) % len(FAMILY) == 0


def test_a_trailing_line_end_is_no_chunk_of_its_own() -> None:
    text = "".join(f"The door {i} opens at {i} and shuts at {i + 1}. " for i in range(20)) + "\n"
    chunks = SPLITTER.split(text, NAMESPACE)
    assert all(text[c.start : c.end].strip() for c in chunks)


def test_equal_pieces_are_one_chunk_id_and_tenants_are_apart() -> None:
    text = "# One\n\nThe same words stand here.\n\n"
    twice = SPLITTER.split(text * 2, NAMESPACE, "markdown")
    other = SPLITTER.split(text * 2, TenantNamespace(b"o" * 32), "markdown")
    assert {c.chunk_id for c in twice}.isdisjoint(c.chunk_id for c in other)


def test_settings_are_in_the_fingerprint() -> None:
    other = DocumentSplitter(TOKENIZER, 33)
    prints = {s.fingerprint(f) for s in (SPLITTER, other) for f in ("text", "markdown")}  # type: ignore[arg-type]
    assert len(prints) == 4
    assert format_of_fingerprint(SPLITTER.fingerprint("markdown")) == "markdown"
    assert format_of_fingerprint(SPLITTER.fingerprint("text")) == "text"


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_of_nothing_is_refused(size: int) -> None:
    with pytest.raises(InvalidValueError):
        DocumentSplitter(TOKENIZER, size)
