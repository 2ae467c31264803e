"""Cutting a document's text into chunks, without losing a character.

Cuts follow the text's structure (headings, paragraphs, sentences), so that an edit in one section
leaves the other sections' chunks as they were. Sizes are counted in the model's own tokens.
"""

import re
import unicodedata
from collections.abc import Iterator
from typing import Literal

from semantic_text_splitter import MarkdownSplitter, TextSplitter

from chunkcache.documents import Chunk
from chunkcache.errors import InvalidValueError
from chunkcache.identity import TenantNamespace, chunk_id
from chunkcache.model.tokenising import TextTokenizer

SPLITTER_VERSION = 2
"""Raised when the same text would be cut in another way."""

TextFormat = Literal["text", "markdown"]

_LONG_RUN = re.compile(r"\S{2048,}|\s{2048,}")
_RUN_PIECE_CHARS = 512
_MAX_JOINED_CHARS = 64
_ZERO_WIDTH_JOINER = "\u200d"


class DocumentSplitter:
    """Cuts canonical text into chunks for one tokenizer.

    Args:
        tokenizer: Counts and encodes.
        chunk_tokens: Largest size of a chunk in tokens.

    """

    def __init__(self, tokenizer: TextTokenizer, chunk_tokens: int) -> None:
        if chunk_tokens < 1:
            raise InvalidValueError("chunk_tokens is less than 1", param="chunk_tokens")
        self._tokenizer = tokenizer
        self._chunk_tokens = chunk_tokens

    def fingerprint(self, text_format: TextFormat) -> str:
        """Names the settings; a document that was cut under others is cut again when it is put."""
        return f"semantic-{SPLITTER_VERSION}/{self._chunk_tokens}/{text_format}"

    def split(
        self, text: str, namespace: TenantNamespace, text_format: TextFormat = "text"
    ) -> tuple[Chunk, ...]:
        """Cut ``text`` (already canonical) into chunks.

        Returns:
            Chunks in order. Joined, their texts are the whole text, apart from pieces that encode
            to no token at all.
        """
        kind = MarkdownSplitter if text_format == "markdown" else TextSplitter
        splitter = kind.from_callback(
            self._tokenizer.count_content,
            (max(1, self._chunk_tokens // 2), self._chunk_tokens),
            trim=False,
        )
        pieces: list[tuple[int, str]] = []
        for base, section in _sections(text):
            for offset, piece in splitter.chunk_indices(section):
                if pieces and not piece.strip() and self._fits(pieces[-1][1] + piece):
                    pieces[-1] = (pieces[-1][0], pieces[-1][1] + piece)
                else:
                    pieces.append((base + offset, piece))
        chunks = []
        for start, piece in pieces:
            token_ids = self._tokenizer.encode_content(piece)
            if token_ids:
                identifier = chunk_id(namespace, self._tokenizer.digest, token_ids)
                chunks.append(Chunk(identifier, start, start + len(piece), token_ids))
        return tuple(chunks)

    def _fits(self, piece: str) -> bool:
        return self._tokenizer.count_content(piece) <= self._chunk_tokens


def format_of_fingerprint(fingerprint: str) -> TextFormat:
    """The text format that a document was cut as."""
    return "markdown" if fingerprint.endswith("/markdown") else "text"


def _sections(text: str) -> Iterator[tuple[int, str]]:
    """The text, with very long runs of one kind (white space, or none) cut into pieces beforehand.

    The splitter's search is quadratic in the length of one unbroken run (a megabyte of one letter
    took four minutes); no structure is lost by cutting where there is none.
    """
    done = 0
    for run in _LONG_RUN.finditer(text):
        if run.start() > done:
            yield done, text[done : run.start()]
        start = run.start()
        while start < run.end():
            end = min(start + _RUN_PIECE_CHARS, run.end())
            latest = min(end + _MAX_JOINED_CHARS, run.end())
            while end < latest and _joins_previous(text, end):
                end += 1
            yield start, text[start:end]
            start = end
        done = run.end()
    if done < len(text):
        yield done, text[done:]


def _joins_previous(text: str, index: int) -> bool:
    """Whether cutting before ``text[index]`` would part what is shown as one character."""
    char = text[index]
    return (
        unicodedata.category(char) in ("Mn", "Me", "Mc", "Cf", "Sk")
        or text[index - 1] == _ZERO_WIDTH_JOINER
    )
