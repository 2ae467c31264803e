"""Case tests, area I: one rule for text, applied before anything is hashed, cut or stored."""

import os
import tempfile
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkcache.documents import canonical_text
from chunkcache.errors import EmptyDocumentError, InvalidValueError
from chunkcache.planning import AskOptions
from chunkcache.results import ItemFailure
from chunkcache.text_files import TextFile, find_text_files

Caches = Callable[..., Any]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("abc\x00def", "abcdef"),
        ("\x00\x00abc", "abc"),
        ("ring \x07 the \x1b[1mbell\x1b[0m", "ring \x07 the \x1b[1mbell\x1b[0m"),
        ("a\rb\r\nc\n", "a\nb\nc\n"),
        ("a\r\x00\nb", "a\nb"),
        ("tab\tand\x0bfeed\x0c", "tab\tand\x0bfeed\x0c"),
    ],
    ids=ascii,
)
def test_I01_control_characters(open_cache: Caches, text: str, kept: str) -> None:
    """NULs go, line ends become one kind, all else stays; nothing is cut at a control character."""
    cache = open_cache()
    result = cache.put("odd", text)
    assert cache.get("odd").text == kept
    assert cache.put("odd", kept).status == "unchanged"
    assert cache.put("same", text).digest == result.digest
    document = cache.get("odd")
    joined = b"".join(bytes(document.chunk_text(c), "utf-8") for c in document.chunks)
    assert joined.decode() == kept


@pytest.mark.parametrize(
    "text", ["", "\x00", " \x00\n", "\ufeff", "\u200b\u200b", "\x07\x1b", "\u3000"], ids=ascii
)
def test_I01_nothing_visible_is_empty(open_cache: Caches, text: str) -> None:
    """A text of nothing but control characters and white space is empty, and stored nowhere."""
    cache = open_cache()
    with pytest.raises(EmptyDocumentError):
        cache.put("empty", text)
    assert cache.list() == []
    assert cache.runtime.stack.stats().entries["disk"] == 0


def test_I03_bad_files_among_good_ones(open_cache: Caches, tmp_path: Path) -> None:
    """Each bad file of a folder is reported with a reason; every good one is cached."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for index in range(20):
        (corpus / f"{index:02}.txt").write_text(f"Note {index}: the code is {index * 37}.")
    (corpus / "05.txt").write_bytes(b"caf\xe9")
    (corpus / "08.txt").unlink()
    (corpus / "08.txt").mkdir()
    (corpus / "11.txt").write_bytes(b"")
    (corpus / "14.txt").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    (corpus / "17.txt").unlink()
    (corpus / "17.txt").symlink_to("nowhere")
    cache = open_cache()
    summary = cache.precache([corpus, tmp_path / "missing"])
    assert (summary.documents, summary.created) == (15, 15)
    reasons = {Path(f.item).name: f.code for f in summary.failures}
    assert reasons == {
        "05.txt": "invalid_encoding",
        "08.txt": "not_a_file",
        "11.txt": "empty_document",
        "14.txt": "invalid_encoding",
        "17.txt": "symlink",
        "missing": "not_found",
    }
    assert all(f.message for f in summary.failures)
    assert len(cache.list()) == 15


def test_I03_a_file_that_cannot_be_read(
    open_cache: Caches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without permission, or gone since it was listed, is one reported item."""
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"The note {name}.")
    open_file = Path.open

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "b.txt":
            raise PermissionError(13, "Permission denied")
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    summary = open_cache().precache([tmp_path / f"{n}.txt" for n in "abc"])
    assert [(f.item, f.code) for f in summary.failures] == [("b.txt", "unreadable")]
    assert summary.created == 2


def test_I03_a_file_that_never_ends(open_cache: Caches, tmp_path: Path) -> None:
    """What is no regular file is reported, not waited for."""
    (tmp_path / "corpus").mkdir()
    os.mkfifo(tmp_path / "corpus" / "pipe.txt")
    (tmp_path / "corpus" / "note.txt").write_text("A note.")
    summary = open_cache().precache([tmp_path / "corpus", tmp_path / "corpus" / "pipe.txt"])
    assert [f.code for f in summary.failures] == ["not_a_file", "not_a_file"]
    assert summary.created == 1


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-be", "utf-32-le"]
)
def test_I04_byte_order_marks(open_cache: Caches, tmp_path: Path, encoding: str) -> None:
    """Behind its byte-order mark a file of any Unicode encoding is the same document."""
    text = "Hello, Łódź 🗝\nsecond line"
    cache = open_cache()
    plain = cache.put("plain", text)
    mark = "\ufeff" if encoding.endswith(("-be", "-le")) else ""
    path = tmp_path / "note.txt"
    path.write_bytes((mark + text).encode(encoding))
    summary = cache.precache([path])
    assert (summary.created, summary.prefilled_chunks) == (1, 0)
    document = cache.get("note.txt")
    assert (document.text, document.digest.hex()) == (text, plain.digest)
    assert document.chunks == cache.get("plain").chunks


@settings(max_examples=30, deadline=None)
@given(st.text(st.characters(min_codepoint=160, max_codepoint=255), min_size=1, max_size=8))
def test_I04_other_encodings_are_reported(text: str) -> None:
    """A file in a legacy encoding is reported as not UTF-8, with the place; it is not guessed."""
    data = ("Gr" + text + " ").encode("cp1252", "replace")
    found = _read(data)
    try:
        expected = data.decode("utf-8")
    except UnicodeDecodeError:
        assert not isinstance(found, str)
        assert found.code == "invalid_encoding"
    else:
        assert found == expected


def _read(data: bytes) -> Any:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        read = TextFile("name", Path(file.name)).read()
        return read if isinstance(read, ItemFailure) else read.text


def test_I05_texts_that_look_alike(open_cache: Caches) -> None:
    """Texts that differ in any character but line ends are different, whatever they look like.

    Keys and values are found by token ids alone: a variant never gets another one's.
    """
    cache = open_cache(policy="none")
    accent = "caf\u00e9 na\u00efve"
    variants = {
        "nfc": accent,
        "nfd": unicodedata.normalize("NFD", accent),
        "zh": "\u4e2d\u56fd",
        "zh2": "\u4e2d\u570b",
        "wide": "\uff41\uff42\uff43",
        "narrow": "abc",
        "upper": "ABC",
        "space": "a b",
        "nbsp": "a\u00a0b",
    }
    assert len(set(variants.values())) == len(variants)
    digests = {cache.put(name, text).digest for name, text in variants.items()}
    assert len(digests) == len(variants)
    keys = [
        tuple(i.key() for i in cache.plan("", [name], AskOptions()).identities) for name in variants
    ]
    assert len(set(keys)) == len(variants)
    assert cache.runtime.stack.stats().prefills == len(variants)
    for name, text in variants.items():
        assert cache.get(name).text == text

    lines = "one line\nanother line"
    windows = cache.put("crlf", lines.replace("\n", "\r\n"))
    unix = cache.put("lf", lines)
    assert windows.digest == unix.digest
    assert unix.prefilled_chunks == 0


@settings(max_examples=40, deadline=None)
@given(
    st.text(st.sampled_from("ab \n\r\x00\x07\ufeff\u200b\u0301🗝é"), min_size=1, max_size=30).filter(
        lambda text: any(c in text for c in "abé🗝")
    )
)
def test_I06_offsets_slice_the_stored_text(load_tiny: Any, text: str) -> None:
    """Offsets of chunks are places in the very text that is returned, whatever was removed from it."""
    from chunkcache.identity import TenantNamespace
    from chunkcache.splitting import DocumentSplitter

    tokenizer = load_tiny("llama").tokenizer
    stored = canonical_text("\x00" * 10 + text + "\x00needle\x00" * 3)
    assert "\x00" not in stored
    chunks = DocumentSplitter(tokenizer, 16).split(stored, TenantNamespace(b"n" * 32))
    assert "".join(stored[c.start : c.end] for c in chunks) == stored
    for chunk in chunks:
        assert tokenizer.decode(chunk.token_ids) == stored[chunk.start : chunk.end]


def test_I06_a_needle_is_cited_where_it_is(open_cache: Caches) -> None:
    """Behind removed characters a chunk still points at its own words."""
    cache = open_cache()
    cache.put("note", "\x00" * 10 + "Chaff. " * 30 + "\x00The needle is 4017.\r\n" + "Chaff. " * 9)
    document = cache.get("note")
    start = document.text.index("needle")
    (chunk,) = (c for c in document.chunks if c.start <= start < c.end)
    assert "needle" in document.chunk_text(chunk)
    answer = cache.answer("What?", ["note"], max_tokens=1)
    assert answer.citations[0].chunk_indexes == tuple(range(len(document.chunks)))


def test_I01_invalid_unicode_is_refused(open_cache: Caches) -> None:
    """A lone surrogate is refused by name, in texts, ids and questions."""
    cache = open_cache()
    cache.put("note", "fine")
    for call in (
        lambda: cache.put("x", "a\ud800b"),
        lambda: cache.put("\udfff", "text"),
        lambda: cache.answer("a\ud800", ["note"]),
    ):
        with pytest.raises(InvalidValueError):
            call()
    assert list(find_text_files([])) == []
