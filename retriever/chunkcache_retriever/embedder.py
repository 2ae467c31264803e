"""What an embedder is, and how a text of any length becomes vectors.

Knows nothing of any model: an embedder names its own tokens. A text with more tokens than an
embedder reads at once is embedded in overlapping windows, so that no part of it is left out.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from chunkcache.errors import ModelError

WINDOWS_VERSION = 1
"""Raised when the same text would be cut into other windows."""

_OVERLAP_PARTS = 8
_SPARE_PARTS = 16

Vectors = npt.NDArray[np.float32]


class Embedder(Protocol):
    """Turns texts into vectors whose inner product says how near they are in meaning.

    Safe to use from several threads.
    """

    @property
    def dim(self) -> int:
        """Numbers per vector."""
        ...

    @property
    def digest(self) -> bytes:
        """32 bytes over the model's content and its settings: another digest, other vectors."""
        ...

    @property
    def max_tokens(self) -> int:
        """Tokens of text that it reads at once, what it adds itself not counted."""
        ...

    def token_spans(self, text: str) -> Sequence[tuple[int, int]]:
        """Where each token of a text lies: its first character and one past its last.

        Args:
            text: Of any length; nothing is cut.
        """
        ...

    def embed(self, texts: Sequence[str], *, is_query: bool = False) -> Vectors:
        """Embed texts, each as if it were alone.

        Args:
            texts: None longer than ``max_tokens`` tokens; may be empty.
            is_query: They are questions, for an embedder that reads those otherwise.

        Returns:
            ``[len(texts), dim]``, rows of length 1.

        Raises:
            InvalidValueError: A text is too long.
        """
        ...


def embed_long(embedder: Embedder, text: str, *, is_query: bool = False) -> list[Vectors]:
    """Embed a text of any length.

    Args:
        embedder: Its ``max_tokens`` bounds a window.
        text: The text.
        is_query: It is a question.

    Returns:
        ``[dim]`` for each window, in order: one window for a text that fits, none for a text
        without a token.

    Raises:
        ModelError: The embedder gives vectors of another shape than it says.
    """
    return list(embed_all(embedder, [text], is_query=is_query)[0])


def embed_all(embedder: Embedder, texts: Sequence[str], *, is_query: bool = False) -> list[Vectors]:
    """As :func:`embed_long` for several texts at once.

    Returns:
        ``[windows, dim]`` for each text; no window for a text without a token.
    """
    windows = [text_windows(embedder, text) for text in texts]
    flat = [piece for pieces in windows for piece in pieces]
    rows = np.zeros((0, embedder.dim), np.float32)
    if flat:
        rows = np.asarray(embedder.embed(flat, is_query=is_query), dtype=np.float32)
        if rows.shape != (len(flat), embedder.dim):
            raise ModelError(
                f"the embedder says {embedder.dim} numbers per vector, and gave an array of "
                f"{list(rows.shape)} for {len(flat)} texts"
            )
    ends = np.cumsum([len(pieces) for pieces in windows], dtype=np.int64)
    return np.split(rows, ends[:-1]) if windows else []


def text_windows(embedder: Embedder, text: str) -> list[str]:
    """Cut a text into overlapping pieces that the embedder can read.

    Returns:
        The text itself if it fits; pieces in order otherwise; nothing for a text without a token.
    """
    spans = embedder.token_spans(text)
    if not spans:
        return []
    if len(spans) <= embedder.max_tokens:
        return [text]
    # A piece that begins or ends inside a word may have more tokens alone than it had here.
    num_tokens = max(1, embedder.max_tokens - embedder.max_tokens // _SPARE_PARTS)
    num_fresh = num_tokens - num_tokens // _OVERLAP_PARTS
    last_start = len(spans) - num_tokens
    num_steps = -(-last_start // num_fresh)
    windows: list[str] = []
    for step in range(num_steps + 1):
        first = last_start * step // num_steps
        start = spans[first][0] if step else 0
        end = spans[first + num_tokens - 1][1] if step < num_steps else len(text)
        assert end - start < len(text), "one character has more tokens than the embedder reads"
        windows += text_windows(embedder, text[start:end])
    return windows
