"""What a file's bytes become: the contract of readers by suffix, and the plain texts' own.

Readers of other formats, and of other encodings, are passed in from above. A byte-order mark at
the start is taken off by every reader; NULs are dropped by the text rules
(:func:`chunkcache.documents.canonical_text`), before anything is hashed or cut.
"""

import codecs
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from chunkcache.documents import Metadata
from chunkcache.splitting import TextFormat

_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True)
class ReadText:
    """A document read from a file.

    Attributes:
        text: Its text, not canonical yet.
        metadata: What the file says about it, for example its title.
    """

    text: str
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True)
class ReadFault:
    """Why a file, or a row of one, gives no document.

    Attributes:
        code: Stable reason.
        message: What is wrong, to be read behind the file's name.
    """

    code: str
    message: str


@dataclass(frozen=True)
class ReadRow:
    """A document read from a row of a file.

    Attributes:
        document_id: The row's own id; empty if it has none.
        text: Its text.
        metadata: Its other columns.
    """

    document_id: str
    text: str
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True)
class FileKind:
    """A kind of file that holds one document.

    Attributes:
        text_format: How its text is cut.
        read: Makes the text of the file's bytes. Called from several threads.
    """

    text_format: TextFormat
    read: Callable[[bytes], ReadText | ReadFault]


@dataclass(frozen=True)
class RowFileKind:
    """A kind of file each of whose rows holds a document.

    Attributes:
        text_format: How their texts are cut.
        read_rows: Makes the rows of the file's bytes, each in its place.
    """

    text_format: TextFormat
    read_rows: Callable[[bytes], Iterable[ReadRow | ReadFault]]


FileKinds = Mapping[str, FileKind | RowFileKind]
"""Kinds by suffix, lower case and with the dot; ``.txt`` is among them."""


def decode_unicode(data: bytes) -> str | ReadFault:
    """Text of UTF-8, or of UTF-16 or UTF-32 behind a byte-order mark; nothing is guessed."""
    encoding = next((e for mark, e in _BYTE_ORDER_MARKS if data.startswith(mark)), "utf-8")
    if encoding == "utf-8" and _looks_like_utf16(data):
        return ReadFault("invalid_encoding", "looks like UTF-16 without a byte-order mark")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        name = encoding.removesuffix("-sig").upper()
        return ReadFault("invalid_encoding", f"is not {name} at byte {error.start}")


def _looks_like_utf16(data: bytes) -> bool:
    """Whether at least a tenth of the bytes are the low controls, which no text holds in number.

    The high bytes of UTF-16 letters of most alphabets are 1 to 6. (Those of ASCII letters are 0,
    and dropping them, as the text rules do, leaves the text.)
    """
    sample = data[:65_536]
    return sum(sample.count(bytes([c])) for c in range(1, 7)) * 10 >= max(len(sample), 1)


def _read_plain(data: bytes) -> ReadText | ReadFault:
    text = decode_unicode(data)
    return text if isinstance(text, ReadFault) else ReadText(text)


PLAIN_TEXT = FileKind("text", _read_plain)
PLAIN_KINDS: FileKinds = {
    ".txt": PLAIN_TEXT,
    ".rst": PLAIN_TEXT,
    ".md": FileKind("markdown", _read_plain),
    ".markdown": FileKind("markdown", _read_plain),
}
"""Text files in Unicode: what is read where nobody passes other readers in."""
