"""Reading text files from disk: which ones, decoded how, named how.

Rules: UTF-8, or UTF-16/32 behind a byte-order mark; anything else is reported, never guessed.
Symbolic links are not followed. A file's document id is its path relative to the folder it was
found under, with forward slashes.
"""

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from chunkcache.results import ItemFailure
from chunkcache.splitting import TextFormat

TEXT_SUFFIXES: dict[str, TextFormat] = {
    ".txt": "text",
    ".rst": "text",
    ".md": "markdown",
    ".markdown": "markdown",
}
"""Files that a folder is searched for. A file named outright is read whatever its suffix."""

_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True)
class TextFile:
    """A file to read.

    Attributes:
        document_id: Its id.
        path: Where it is.
        text_format: How to cut it.
    """

    document_id: str
    path: Path
    text_format: TextFormat

    def read(self) -> str | ItemFailure:
        """The file's text, or why there is none."""
        try:
            data = self.path.read_bytes()
        except OSError as error:
            reason = error.strerror or type(error).__name__
            return ItemFailure(self.document_id, "unreadable", f"cannot be read: {reason}")
        encoding = next((e for mark, e in _BYTE_ORDER_MARKS if data.startswith(mark)), "utf-8")
        if encoding == "utf-8" and _looks_like_utf16(data):
            return ItemFailure(
                self.document_id,
                "invalid_encoding",
                "looks like UTF-16 without a byte-order mark",
            )
        try:
            return data.decode(encoding)
        except UnicodeDecodeError as error:
            return ItemFailure(
                self.document_id,
                "invalid_encoding",
                f"is not {encoding.removesuffix('-sig').upper()} at byte {error.start}",
            )


def _looks_like_utf16(data: bytes) -> bool:
    """Whether at least a tenth of the bytes are the low controls, which no text holds in number.

    The high bytes of UTF-16 letters of most alphabets are 1 to 6. (Those of ASCII letters are 0,
    and dropping them, as the text rules do, leaves the text.)
    """
    sample = data[:65_536]
    return sum(sample.count(bytes([c])) for c in range(1, 7)) * 10 >= max(len(sample), 1)


def find_text_files(paths: Iterable[Path]) -> Iterator[TextFile | ItemFailure]:
    """Every text file under some paths, in a fixed order, and what could not be taken.

    Args:
        paths: Files and folders.
    """
    seen: set[str] = set()
    for found in _walk_all(paths):
        if isinstance(found, TextFile):
            if found.document_id in seen:
                yield ItemFailure(
                    found.document_id, "duplicate_id", "was found under another path already"
                )
                continue
            seen.add(found.document_id)
        yield found


def _walk_all(paths: Iterable[Path]) -> Iterator[TextFile | ItemFailure]:
    for path in paths:
        if path.is_file():
            yield TextFile(path.name, path, TEXT_SUFFIXES.get(path.suffix.lower(), "text"))
        elif path.is_dir():
            yield from _walk(path, path)
        elif path.exists():
            yield ItemFailure(str(path), "not_a_file", "is neither a regular file nor a folder")
        else:
            yield ItemFailure(str(path), "not_found", "no such file or folder")


def _walk(folder: Path, root: Path) -> Iterator[TextFile | ItemFailure]:
    try:
        children = sorted(folder.iterdir())
    except OSError as error:
        reason = error.strerror or type(error).__name__
        yield ItemFailure(_name(folder, root), "unreadable", f"cannot be listed: {reason}")
        return
    for child in children:
        suffix = child.suffix.lower()
        if child.is_symlink():
            if suffix in TEXT_SUFFIXES:
                yield ItemFailure(_name(child, root), "symlink", "symbolic links are not followed")
        elif child.is_dir():
            if suffix in TEXT_SUFFIXES:
                yield ItemFailure(_name(child, root), "not_a_file", "is a folder, not a text file")
            yield from _walk(child, root)
        elif suffix in TEXT_SUFFIXES and not child.is_file():
            yield ItemFailure(_name(child, root), "not_a_file", "is not a regular file")
        elif suffix in TEXT_SUFFIXES:
            yield TextFile(_name(child, root), child, TEXT_SUFFIXES[suffix])


def _name(path: Path, root: Path) -> str:
    """The id of a file: undecodable bytes of its name are shown as backslash escapes."""
    name = path.relative_to(root).as_posix() or root.name
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
