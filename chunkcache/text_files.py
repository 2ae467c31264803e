"""Finding files to cache on disk: which ones, named how, read by which kind's reader.

Symbolic links are not followed. A file's document id is its path relative to the folder it was
found under, with forward slashes; a row's is its own. Each document's metadata says where it came
from under :data:`SOURCE_KEY`, so that those whose file is gone can be told from all others. Knows
readers by suffix (:mod:`chunkcache.file_kinds`), and no file format.
"""

import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from chunkcache.documents import Metadata
from chunkcache.file_kinds import (
    PLAIN_KINDS,
    PLAIN_TEXT,
    FileKind,
    FileKinds,
    ReadFault,
    RowFileKind,
)
from chunkcache.results import ItemFailure
from chunkcache.splitting import TextFormat

SOURCE_KEY = "chunkcache_source"
"""Metadata field of a document that came from a file: ``{"root", "path"}``. The root is a digest of
the absolute path that was given, the path is the file's below it."""

MAX_FILE_BYTES = 64 << 20
"""Larger files are reported, not read."""


@dataclass(frozen=True)
class TextItem:
    """A document to cache, given as text."""

    document_id: str
    text: str
    metadata: Metadata = field(default_factory=dict)
    text_format: TextFormat = "text"


@dataclass(frozen=True)
class TextFile:
    """A file that holds one document.

    Attributes:
        document_id: Its id.
        path: Where it is.
        kind: How to read and cut it.
        metadata: The document's metadata; what the reader finds is added.
    """

    document_id: str
    path: Path
    kind: FileKind = PLAIN_TEXT
    metadata: Metadata = field(default_factory=dict)

    def read(self) -> TextItem | ItemFailure:
        """The file's document, or why there is none."""
        data = _bytes_of(self.path, self.document_id)
        if isinstance(data, ItemFailure):
            return data
        found = self.kind.read(data)
        if isinstance(found, ReadFault):
            return ItemFailure(self.document_id, found.code, found.message)
        metadata = {**found.metadata, **self.metadata}
        return TextItem(self.document_id, found.text, metadata, self.kind.text_format)


@dataclass(frozen=True)
class _Found:
    """A file, not read yet."""

    name: str
    path: Path
    source: Metadata


def find_text_files(
    paths: Iterable[Path], kinds: FileKinds = PLAIN_KINDS
) -> Iterator[TextFile | TextItem | ItemFailure]:
    """Every document under some paths, in a fixed order, and what could not be taken.

    Files of rows are read here, one at a time; all others when they are asked to.

    Args:
        paths: Files and folders.
        kinds: Readers by suffix. A folder is searched for these; a file named outright is read
            whatever its suffix, as plain text if no kind has it.
    """
    seen: set[str] = set()
    for found in _walk_all(paths, kinds):
        for item in (found,) if isinstance(found, ItemFailure) else _items(found, kinds):
            if not isinstance(item, ItemFailure):
                if item.document_id in seen:
                    yield ItemFailure(
                        item.document_id, "duplicate_id", "was found under another path already"
                    )
                    continue
                seen.add(item.document_id)
            yield item


def source_root(path: Path) -> str:
    """What documents found under a path have as their source's root."""
    return blake3(str(path.resolve()).encode("utf-8", "surrogateescape")).hexdigest(8)


def _items(found: _Found, kinds: FileKinds) -> Iterator[TextFile | TextItem | ItemFailure]:
    kind = kinds.get(found.path.suffix.lower(), kinds[".txt"])
    metadata: Metadata = {SOURCE_KEY: dict(found.source)}
    if isinstance(kind, FileKind):
        yield TextFile(found.name, found.path, kind, metadata)
        return
    assert isinstance(kind, RowFileKind)
    data = _bytes_of(found.path, found.name)
    if isinstance(data, ItemFailure):
        yield data
        return
    for number, row in enumerate(kind.read_rows(data), 1):
        if isinstance(row, ReadFault):
            yield ItemFailure(f"{found.name}#{number}", row.code, row.message)
        else:
            name = row.document_id or f"{found.name}#{number}"
            yield TextItem(name, row.text, {**row.metadata, **metadata}, kind.text_format)


def _bytes_of(path: Path, name: str) -> bytes | ItemFailure:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        return ItemFailure(name, "unreadable", f"cannot be read: {_reason(error)}")
    if len(data) > MAX_FILE_BYTES:
        return ItemFailure(name, "too_large", f"has over {MAX_FILE_BYTES:,} bytes")
    return data


def _walk_all(paths: Iterable[Path], kinds: FileKinds) -> Iterator[_Found | ItemFailure]:
    for path in paths:
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            yield ItemFailure(str(path), "not_found", "no such file or folder")
        except OSError as error:
            yield ItemFailure(str(path), "unreadable", f"cannot be read: {_reason(error)}")
        else:
            if stat.S_ISREG(mode):
                yield _Found(path.name, path, _source(path, path.name))
            elif stat.S_ISDIR(mode):
                yield from _walk(path, path, kinds)
            else:
                yield ItemFailure(str(path), "not_a_file", "is neither a regular file nor a folder")


def _walk(folder: Path, root: Path, kinds: FileKinds) -> Iterator[_Found | ItemFailure]:
    try:
        children = list(_children(folder))
    except OSError as error:
        yield ItemFailure(_name(folder, root), "unreadable", f"cannot be listed: {_reason(error)}")
        return
    for child, mode in children:
        is_wanted = child.suffix.lower() in kinds
        name = _name(child, root)
        if stat.S_ISLNK(mode):
            if is_wanted:
                yield ItemFailure(name, "symlink", "symbolic links are not followed")
        elif stat.S_ISDIR(mode):
            if is_wanted:
                yield ItemFailure(name, "not_a_file", "is a folder, not a file")
            yield from _walk(child, root, kinds)
        elif is_wanted and not stat.S_ISREG(mode):
            yield ItemFailure(name, "not_a_file", "is not a regular file")
        elif is_wanted:
            yield _Found(name, child, _source(root, name))


def _children(folder: Path) -> Iterator[tuple[Path, int]]:
    """What is in a folder, in order, with each one's mode; what vanishes meanwhile is left out."""
    for child in sorted(folder.iterdir()):
        with suppress(FileNotFoundError):
            yield child, child.lstat().st_mode


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


def _source(root: Path, name: str) -> Mapping[str, str]:
    return {"root": source_root(root), "path": name}


def _name(path: Path, root: Path) -> str:
    """The id of a file: undecodable bytes of its name are shown as backslash escapes."""
    name = path.relative_to(root).as_posix()
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
