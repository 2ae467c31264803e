"""An embedder without a model, for tests."""

import re
from collections.abc import Sequence

import numpy as np
from blake3 import blake3

from chunkcache.errors import InvalidValueError
from chunkcache_retriever.embedder import Vectors


class FixedEmbedder:
    """Adds up one fixed vector per word: texts that share words are near each other.

    Args:
        dim: Numbers per vector.
        max_tokens: Words read at once.
        name: Another name is another embedder, with other vectors.

    Attributes:
        num_embedded: Texts embedded so far.
    """

    def __init__(self, dim: int = 256, max_tokens: int = 64, name: str = "fixed") -> None:
        self.dim = dim
        self.max_tokens = max_tokens
        self.digest = blake3(f"{name}/{dim}/{max_tokens}".encode()).digest()
        self.num_embedded = 0

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        """A token is a word."""
        return [word.span() for word in re.finditer(r"\w+", text)]

    def embed(self, texts: Sequence[str], *, is_query: bool = False) -> Vectors:
        """Questions are embedded as all other texts."""
        sums = np.zeros((len(texts), self.dim), np.float32)
        for i, text in enumerate(texts):
            words = re.findall(r"\w+", text.lower())
            if len(words) > self.max_tokens:
                raise InvalidValueError(f"a text of {len(words)} words, over {self.max_tokens}")
            for word in words:
                key = int.from_bytes(blake3(self.digest + word.encode()).digest(8), "little")
                sums[i] += np.random.default_rng(key).standard_normal(self.dim, np.float32)
        self.num_embedded += len(texts)
        return sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-30)
