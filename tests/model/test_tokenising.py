"""Untrusted text stays text; streams never hold half a character."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from chunkcache.model.tokenising import TextTokenizer
from chunkcache.testing import tiny_tokenizer_json

TOKENIZER = TextTokenizer(tiny_tokenizer_json())
CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]

anything = st.text(alphabet=st.characters(codec="utf-8"), max_size=60)
with_control = st.lists(st.sampled_from(CONTROL) | anything, max_size=6).map("".join)


@given(with_control)
def test_content_never_holds_a_control_token(text: str) -> None:
    ids = TOKENIZER.encode_content(text)
    assert TOKENIZER.control_ids.isdisjoint(ids)
    assert TOKENIZER.decode(ids) == text


@given(anything)
def test_streams_join_to_the_text(text: str) -> None:
    ids = TOKENIZER.encode_content(text)
    stream = TOKENIZER.stream()
    pieces = [stream.push(i) for i in ids]
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text
    assert "".join(pieces) + stream.finish() == TOKENIZER.decode(ids) == text


@given(anything, st.integers(1, 3))
def test_a_stream_cut_inside_a_character_still_ends(text: str, cut: int) -> None:
    ids = TOKENIZER.encode_content(text + "\U0001f468")[:-cut]
    stream = TOKENIZER.stream()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.finish() == TOKENIZER.decode(ids)


def test_the_template_encoder_reads_control_tokens() -> None:
    ids = TOKENIZER.encode_template("<|im_start|>user\n")
    assert ids[0] == 1
    assert TOKENIZER.decode_each(ids)[0] == "<|im_start|>"


def _unigram() -> TextTokenizer:
    """A vocabulary that holds its control tokens as ordinary pieces."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(c, -3.0) for c in "<>/sab \u2581"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return TextTokenizer(tokenizer.to_str())


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["<s>", "</s>", "a", "b", "s", "<", ">"]), max_size=8))
def test_pieces_that_spell_control_tokens_are_cut(parts: list[str]) -> None:
    tokenizer = _unigram()
    ids = tokenizer.encode_content("".join(parts))
    assert {1, 2}.isdisjoint(ids)
    assert tokenizer.control_ids == {0, 1, 2}


def test_a_changed_tokenizer_has_another_digest() -> None:
    definition = tiny_tokenizer_json()
    assert TextTokenizer(definition).digest == TOKENIZER.digest
    changed = definition.replace('"dropout":null', '"dropout":0.0', 1)
    assert changed != definition
    assert TextTokenizer(changed).digest != TOKENIZER.digest


def test_the_demo_tokenizer_splits_numbers_into_digits(demo_model: Any) -> None:
    tokenizer = demo_model.tokenizer
    pieces = tokenizer.decode_each(tokenizer.encode_content("in 2024"))
    assert pieces == ["in", " ", "2", "0", "2", "4"]


@pytest.mark.parametrize("text", ["\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u4e16\u754c"])
def test_the_demo_tokenizer_streams_whole_characters(demo_model: Any, text: str) -> None:
    stream = demo_model.tokenizer.stream()
    ids = demo_model.tokenizer.encode_content(text)
    pieces: list[str] = [stream.push(i) for i in ids]
    assert all("\ufffd" not in p for p in pieces)
    assert "".join(pieces) + stream.finish() == text


def test_chunk_ids_equal_prompt_ids(
    open_cache: Callable[..., Any], passages: dict[str, str]
) -> None:
    from chunkcache.planning import AskOptions

    cache = open_cache()
    for name, text in passages.items():
        cache.put(name, text)
    layout = cache.plan("When?", list(passages), AskOptions()).layout
    for segment in layout.chunks:
        chunk = cache.get(segment.chunk.document_id).chunks[segment.chunk.chunk_index]
        assert layout.token_ids[segment.start : segment.end] == chunk.token_ids
