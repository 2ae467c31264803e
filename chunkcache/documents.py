"""Documents and chunks as values: what a caller gives, and how it was cut.

Text rules live here, in one place, and are applied before anything is hashed, cut or stored, so
that offsets always slice the text that is returned.
"""

import json
import math
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field

from blake3 import blake3

from chunkcache.errors import EmptyDocumentError, InvalidValueError
from chunkcache.identity import ChunkId, TokenizerDigest

MAX_DOCUMENT_ID_CHARS = 2_000
MAX_METADATA_BYTES = 1 << 20
MAX_FILE_NAME_CHARS = 512

JsonValue = str | int | float | bool | None | list["JsonValue"] | dict[str, "JsonValue"]
Metadata = Mapping[str, JsonValue]


@dataclass(frozen=True)
class Chunk:
    """A contiguous piece of a document.

    Attributes:
        chunk_id: Digest of the token ids (tenant and tokenizer included).
        start: First character of the piece in the document's text.
        end: One past its last character.
        token_ids: The piece, tokenised alone. These are the truth about the chunk.
    """

    chunk_id: ChunkId
    start: int
    end: int
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        """A chunk is never empty."""
        if not self.token_ids or not 0 <= self.start < self.end:
            raise InvalidValueError(
                f"a chunk of {len(self.token_ids)} tokens cannot span [{self.start}, {self.end})"
            )


@dataclass(frozen=True)
class UploadedFile:
    """What a client said of the file that a document came in; told again, and used for nothing.

    Attributes:
        filename: Its name.
        purpose: What it is for.
    """

    filename: str
    purpose: str

    def __post_init__(self) -> None:
        """Check what people choose.

        Raises:
            InvalidValueError: A name cannot be stored or shown.
        """
        for param, text in (("file", self.filename), ("purpose", self.purpose)):
            if not 0 < len(text) <= MAX_FILE_NAME_CHARS or not text.isprintable():
                raise InvalidValueError(
                    f"a file's name and purpose have 1 to {MAX_FILE_NAME_CHARS} printable "
                    "characters",
                    param=param,
                )


@dataclass(frozen=True)
class Document:
    """One version of a caller's document, cut into chunks.

    Attributes:
        document_id: The caller's id, opaque to us.
        text: Canonical text (:func:`canonical_text`).
        metadata: JSON object, returned as given; never part of any key or prompt.
        chunks: In order; together they cover every character that tokenises to something.
        tokenizer: Digest of the tokenizer that made the chunks.
        chunking: Fingerprint of the splitter's settings.
        version: 1 for a new id, one more for each change of text.
        created_at: Unix seconds of version 1.
        updated_at: Unix seconds of this version.
        expires_at: Unix seconds from which on it is not found any more; None is never.
        file: The file that it came in; None keeps what the version before it had.
        collections: Ids of the collections that it is in; a new version stays in them.
    """

    document_id: str
    text: str
    metadata: Metadata
    chunks: tuple[Chunk, ...]
    tokenizer: TokenizerDigest
    chunking: str
    version: int = 1
    created_at: float = 0.0
    updated_at: float = 0.0
    expires_at: float | None = None
    file: UploadedFile | None = None
    collections: tuple[str, ...] = ()
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        """Check ids and sizes, derive the text's digest."""
        check_document_id(self.document_id)
        check_metadata(self.metadata)
        check_expiry(self.expires_at)
        if not self.chunks:
            raise EmptyDocumentError(f"document {self.document_id!r} has no text to cache")
        object.__setattr__(self, "digest", text_digest(self.text))

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(len(c.token_ids) for c in self.chunks)

    def chunk_text(self, chunk: Chunk) -> str:
        """The characters that ``chunk`` was made from."""
        return self.text[chunk.start : chunk.end]


def text_digest(text: str) -> bytes:
    """BLAKE3 of a canonical text, 32 bytes."""
    return blake3(text.encode("utf-8")).digest()


def canonical_text(text: str, *, param: str = "text") -> str:
    """Apply the text rules: NULs and leading BOMs are dropped, line ends become LF.

    Nothing else changes: no Unicode normalisation, no stripping, no re-encoding. Two texts that
    differ in any other way stay different documents.

    Raises:
        InvalidValueError: The text holds lone surrogates (it did not come from valid UTF-8).
        EmptyDocumentError: Only white space and control or format characters are left.
    """
    if not isinstance(text, str):
        raise InvalidValueError(f"text is a {type(text).__name__}, not a string", param=param)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidValueError(
            f"text is not valid Unicode at character {error.start}", param=param
        ) from error
    text = text.replace("\x00", "").lstrip("\ufeff")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not any(_is_visible(c) for c in text):
        raise EmptyDocumentError("the text is empty (or only white space)", param=param)
    return text


def _is_visible(char: str) -> bool:
    return not char.isspace() and unicodedata.category(char) not in ("Cc", "Cf", "Zs", "Zl", "Zp")


def check_document_id(document_id: str) -> None:
    """Reject ids that cannot be stored or shown.

    Raises:
        InvalidValueError: Empty, too long, NUL or lone surrogate inside.
    """
    if not isinstance(document_id, str) or not document_id:
        raise InvalidValueError("a document id is a non-empty string", param="document_id")
    if len(document_id) > MAX_DOCUMENT_ID_CHARS:
        raise InvalidValueError(
            f"a document id has {len(document_id)} characters, over {MAX_DOCUMENT_ID_CHARS}",
            param="document_id",
        )
    if "\x00" in document_id:
        raise InvalidValueError("a document id holds a NUL", param="document_id")
    try:
        document_id.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidValueError(
            "a document id is not valid Unicode", param="document_id"
        ) from error


def check_expiry(expires_at: float | None) -> None:
    """A time of expiry is a moment.

    Raises:
        InvalidValueError: Not positive, or not finite.
    """
    if expires_at is not None and not 0.0 < expires_at < math.inf:
        raise InvalidValueError(f"a document cannot expire at {expires_at}", param="expires_at")


def expiry_time(expires_at: float | None, ttl_seconds: float | None, now: float) -> float | None:
    """When a document expires that is given a moment, or a time to live, or neither.

    Args:
        expires_at: Unix seconds.
        ttl_seconds: Seconds from now.
        now: Unix seconds.

    Raises:
        InvalidValueError: Both are given, or it would have expired already.
    """
    if expires_at is not None and ttl_seconds is not None:
        raise InvalidValueError("give expires_at or ttl_seconds, not both", param="ttl_seconds")
    if ttl_seconds is not None:
        if not ttl_seconds > 0.0:
            raise InvalidValueError(f"a time to live of {ttl_seconds} s", param="ttl_seconds")
        expires_at = now + ttl_seconds
    if expires_at is not None and not expires_at > now:
        raise InvalidValueError("expires_at is not in the future", param="expires_at")
    check_expiry(expires_at)
    return expires_at


def check_metadata(metadata: Metadata) -> None:
    """Metadata is a JSON object of bounded size.

    Raises:
        InvalidValueError: Not an object, not JSON, not valid Unicode, or over 1 MiB encoded.
    """
    if not isinstance(metadata, Mapping):
        raise InvalidValueError("metadata is not an object", param="metadata")
    try:
        size_bytes = len(json.dumps(dict(metadata), allow_nan=False).encode())
        # Escapes hide lone surrogates, which the store cannot hold.
        json.dumps(dict(metadata), ensure_ascii=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValueError(f"metadata is not JSON: {error}", param="metadata") from error
    if size_bytes > MAX_METADATA_BYTES:
        raise InvalidValueError(
            f"metadata has {size_bytes} bytes, over {MAX_METADATA_BYTES}", param="metadata"
        )
