"""Reading a corpus pack that nobody vouches for: every size and name is checked before it is used."""

import stat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from chunkcache.errors import ForeignPackError, PackError, StoreFormatError
from chunkcache.identity import ENTRY_FORMAT_VERSION, ModelDigest, TokenizerDigest
from chunkcache.store.records import decode_record
from chunkcache.upkeep.pack_format import (
    MANIFEST_NAME,
    MAX_DOCUMENT_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_SHARD_HEADER_BYTES,
    MAX_SHARDS,
    NAME,
    PACK_FORMAT,
    PACK_KIND,
    PackDocument,
    PackManifest,
    document_name,
    shard_name,
)


class PackReader:
    """An open pack.

    Args:
        directory: The pack.

    Raises:
        PackError: It is not a pack, or not a whole one.
        ForeignPackError: It is of another format.

    Attributes:
        manifest: What it says about itself.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.manifest = _manifest(directory / MANIFEST_NAME)
        self._shards: dict[str, int] = {}
        self._entries: dict[int, list[str]] = {}
        self._open: tuple[int, Any] | None = None
        for number in range(self.manifest.shards):
            for name in self._shard(number).keys():  # noqa: SIM118 - no mapping
                self._add(name, number)
        documents = sum(name.endswith(".document") for name in self._shards)
        wanted = (self.manifest.documents, self.manifest.entries)
        if (documents, len(self._shards) - documents) != wanted:
            raise PackError(
                f"the pack holds {documents} documents and {len(self._shards) - documents} "
                f"entries, its manifest says {wanted[0]} and {wanted[1]}"
            )

    def check_fits(self, model: ModelDigest, tokenizer: TokenizerDigest) -> None:
        """Refuse a pack whose entries another model computed, or whose text another tokenizer cut.

        Raises:
            ForeignPackError: One of them is another one; the message names both digests.
        """
        for what, theirs, ours in (
            ("model", self.manifest.model, model.hex()),
            ("tokenizer", self.manifest.tokenizer, tokenizer.hex()),
        ):
            if theirs != ours:
                raise ForeignPackError(
                    f"the pack was made with {what} {theirs[:16]!r}, this one is {ours[:16]!r}"
                )

    def document(self, number: int) -> PackDocument:
        """A document by its number.

        Raises:
            PackError: It is missing or damaged.
        """
        data = self._tensor(document_name(number), MAX_DOCUMENT_BYTES)
        try:
            return decode_record(data.data, PackDocument, f"document {number} of the pack")
        except StoreFormatError as error:
            raise PackError(error.message) from error

    def entry_names(self, number: int, *, are_behind: bool) -> list[str]:
        """Names of the entries that come with a document."""
        kind = ".behind." if are_behind else ".entry."
        return sorted(n for n in self._entries.get(number, ()) if kind in n)

    def entry(self, name: str) -> memoryview:
        """An entry's bytes, unchecked.

        Raises:
            PackError: The pack is damaged.
        """
        return self._tensor(name, None).data

    def _add(self, name: str, shard: int) -> None:
        parts = NAME.fullmatch(name)
        if parts is None or name in self._shards:
            raise PackError(f"the pack holds a tensor {name[:80]!r}, which no pack has there")
        number = int(parts[1])
        if number >= self.manifest.documents:
            raise PackError(f"the pack holds a tensor {name!r} of no document")
        self._shards[name] = shard
        if parts[2] != "document":
            self._entries.setdefault(number, []).append(name)

    def _tensor(self, name: str, max_bytes: int | None) -> np.ndarray:
        shard = self._shards.get(name)
        if shard is None:
            raise PackError(f"the pack lacks {name}")
        file = self._shard(shard)
        try:
            piece = file.get_slice(name)
            shape = piece.get_shape()
            if piece.get_dtype() != "U8" or len(shape) != 1 or not shape[0]:
                raise PackError(f"{name} of the pack is no row of bytes")
            if max_bytes is not None and shape[0] > max_bytes:
                raise PackError(f"{name} of the pack has {shape[0]} bytes, over {max_bytes}")
            return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise PackError(f"{shard_name(shard)} of the pack cannot be read: {error}") from error

    def _shard(self, number: int) -> Any:
        """A shard; the one that was open before is let go."""
        if self._open is None or self._open[0] != number:
            path = self._directory / shard_name(number)
            _check_shard(path)
            try:
                self._open = (number, safe_open(path, framework="np").__enter__())
            except (SafetensorError, OSError) as error:
                raise PackError(f"{path.name} of the pack is damaged: {error}") from error
        return self._open[1]


def _manifest(path: Path) -> PackManifest:
    data = _regular_file(path, MAX_MANIFEST_BYTES)
    try:
        manifest = msgspec.json.decode(data, type=PackManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PackError(f"{MANIFEST_NAME} is no manifest of a pack: {error}") from error
    if manifest.kind != PACK_KIND:
        raise PackError(f"{MANIFEST_NAME} is no manifest of a pack")
    for what, theirs, ours in (
        ("pack format", manifest.format, PACK_FORMAT),
        ("entry format", manifest.entry_format, ENTRY_FORMAT_VERSION),
    ):
        if theirs != ours:
            raise ForeignPackError(f"the pack has {what} {theirs}, this build reads {ours}")
    if not 0 <= manifest.shards <= MAX_SHARDS or min(manifest.documents, manifest.entries) < 0:
        raise PackError(f"{MANIFEST_NAME} counts {manifest.shards} files")
    return manifest


def _regular_file(path: Path, max_bytes: int) -> bytes:
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
            raise PackError(f"{path.name} of the pack is no file of at most {max_bytes} bytes")
        return path.read_bytes()
    except OSError as error:
        raise PackError(f"{path.name} of the pack cannot be read: {error.strerror}") from error


def _check_shard(path: Path) -> None:
    """Look at a shard's size and header length before anything maps it."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise PackError(f"{path.name} of the pack is no file")
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise PackError(f"{path.name} of the pack cannot be read: {error.strerror}") from error
    if not 0 < header_bytes <= min(MAX_SHARD_HEADER_BYTES, status.st_size - 8):
        raise PackError(f"{path.name} of the pack is cut short, or has an oversized header")
