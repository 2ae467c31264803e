"""Readers of files by suffix: text in any encoding, HTML, PDF, Word, and rows of CSV and JSONL.

One rule for encodings: Unicode as :mod:`chunkcache.file_kinds` reads it comes first. Otherwise an
encoding is detected (``charset-normalizer``), and taken only where a file is long enough to tell
and the text reads like a language; the document's metadata then say so
(``{"source_encoding": "cp1252"}``). What cannot be told is reported as ``invalid_encoding``, what is
not text as ``binary``. HTML may name its encoding itself.

Parsers of the extra ``files`` are loaded in a process of their own, when such a file comes.
"""

import codecs
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from chunkcache.documents import JsonValue
from chunkcache.file_kinds import (
    FileKind,
    FileKinds,
    ReadFault,
    ReadText,
    RowFileKind,
    decode_unicode,
)
from chunkcache_retriever import document_parser
from chunkcache_retriever.row_readers import RowColumns, read_csv, read_jsonl

MAX_PARSE_SECONDS = 180.0
MIN_DETECTED_BYTES = 64
"""Shorter texts in an unknown encoding could be read in many ways."""

_MAX_CHAOS = 0.1
_DETECTED_BYTES = 1 << 16
_DECLARED = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_.:-]{1,40})", re.I)
_DECLARED_BYTES = 4_096
_NO_CHARSETS = ("idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape")
"""Python's own text codecs that no page is written in."""
_MAX_CONTROLS_RATIO = 0.02


def file_kinds(columns: RowColumns | None = None) -> FileKinds:
    """Every kind of file that can be read, by suffix.

    Args:
        columns: Which columns of rows hold what.
    """
    columns = columns or RowColumns()
    html = FileKind("markdown", _read_html)
    return {
        ".txt": FileKind("text", read_text),
        ".rst": FileKind("text", read_text),
        ".md": FileKind("markdown", read_text),
        ".markdown": FileKind("markdown", read_text),
        ".html": html,
        ".htm": html,
        ".xhtml": html,
        ".pdf": FileKind("text", partial(_parse, "pdf")),
        ".docx": FileKind("markdown", partial(_parse, "docx")),
        ".csv": RowFileKind("text", partial(_read_rows, read_csv, columns)),
        ".jsonl": RowFileKind("text", partial(_read_rows, read_jsonl, columns)),
        ".ndjson": RowFileKind("text", partial(_read_rows, read_jsonl, columns)),
    }


def read_text(data: bytes) -> ReadText | ReadFault:
    """A text in Unicode, or in an encoding that can be told."""
    text = decode_unicode(data)
    if isinstance(text, str):
        return ReadText(text)
    if _is_binary(data):
        return ReadFault("binary", "is not a text")
    encoding = _detected_encoding(data)
    if encoding is None:
        return text
    try:
        return ReadText(data.decode(encoding), {"source_encoding": encoding})
    except UnicodeDecodeError:
        return text


def _read_html(data: bytes) -> ReadText | ReadFault:
    declared = _DECLARED.search(data[:_DECLARED_BYTES])
    decoded = decode_unicode(data)
    read = ReadText(decoded) if isinstance(decoded, str) else None
    if read is None and declared is not None:
        read = _read_declared(data, declared[1].decode("ascii"))
    found = read or read_text(data)
    if isinstance(found, ReadFault):
        return found
    text = found.text.replace("\x00", "").encode("utf-8", "replace")
    parsed = _parse("html", text)
    if isinstance(parsed, ReadFault):
        return parsed
    return ReadText(parsed.text, {**parsed.metadata, **found.metadata})


def _read_declared(data: bytes, name: str) -> ReadText | None:
    """The text in the encoding that a page names; None if that is none, or is not so."""
    try:
        if codecs.lookup(name).name in _NO_CHARSETS:
            return None
        return ReadText(data.decode(name), {"source_encoding": name.lower()})
    except (LookupError, UnicodeError):
        return None


def _read_rows(read: Any, columns: RowColumns, data: bytes) -> Any:
    found = read_text(data)
    return [found] if isinstance(found, ReadFault) else read(found.text.lstrip("\ufeff"), columns)


def _parse(kind: str, data: bytes) -> ReadText | ReadFault:
    """Parse in a process of its own."""
    program = str(Path(document_parser.__file__))
    try:
        # -P: beside the program stand modules whose names others could take for their own. A group
        # of its own: an interrupt from the terminal ends the job behind the document at hand, so it
        # must not end that document's parser. What parsers complain of may be as long as they like.
        done = subprocess.run(
            [sys.executable, "-P", program, kind],
            input=data,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=MAX_PARSE_SECONDS,
            check=False,
            process_group=None if sys.platform == "win32" else 0,
        )
    except subprocess.TimeoutExpired:
        return ReadFault("too_slow", f"takes over {MAX_PARSE_SECONDS:.0f} s to parse")
    if done.returncode:
        return ReadFault("unreadable", f"ended its parser (exit status {done.returncode})")
    result: Mapping[str, str] = json.loads(done.stdout)
    if "code" in result:
        return ReadFault(result["code"], result["message"])
    title = result["title"].strip()
    metadata: dict[str, JsonValue] = {"title": title} if title else {}
    return ReadText(result["text"], metadata)


def _detected_encoding(data: bytes) -> str | None:
    """The encoding of a text that is long enough to tell; None if it cannot be told."""
    if len(data) < MIN_DETECTED_BYTES:
        return None
    from charset_normalizer import from_bytes

    best = from_bytes(data[:_DETECTED_BYTES]).best()
    if best is None or best.chaos > _MAX_CHAOS or not best.coherence:
        return None
    return best.encoding


def _is_binary(data: bytes) -> bool:
    """Whether bytes that are no Unicode hold more control characters than any text does."""
    sample = data[:_DETECTED_BYTES]
    num_controls = sum(sample.count(bytes([c])) for c in range(32) if c not in b"\t\n\v\f\r\x1b")
    return num_controls > _MAX_CONTROLS_RATIO * len(sample)
