"""Embedding by a service with OpenAI's ``/v1/embeddings``.

Such a service does not say how it cuts a text into tokens, so its tokens are estimated from above: a
run of at most four ASCII letters or digits is one, and so is every other character but white space.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

import httpx
import numpy as np

from chunkcache.errors import InvalidValueError, RemoteServerError
from chunkcache.identity import digest_fields
from chunkcache_retriever.embedder import Vectors
from chunkcache_retriever.json_service import JsonService

API_KEY_VARIABLE: Final = "CHUNKCACHE_EMBEDDER_API_KEY"
DEFAULT_MAX_TOKENS: Final = 256

_TOKEN = re.compile(r"[A-Za-z0-9]{1,4}|[^\sA-Za-z0-9]")
_BATCH_TEXTS = 64


class RemoteEmbedder:
    """A model behind a service. The model's name stands for its content: a new one needs a new name.

    Args:
        base_url: For example ``http://localhost:8080/v1``.
        model: The model's name there.
        max_tokens: Estimated tokens read at once; the service's own bound must not be less.
        query_prefix: What stands before a question, for models that read those otherwise.
        transport: HTTP transport, for tests.

    Raises:
        ServerUnreachableError: The service cannot be reached.
        RemoteServerError: It does not embed.

    Attributes:
        dim: Numbers per vector.
        digest: Names the service's model and how texts are cut.
        max_tokens: Estimated tokens of text read at once.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        query_prefix: str = "",
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._service = JsonService(base_url, API_KEY_VARIABLE, transport=transport)
        self._model = model
        self._query_prefix = query_prefix
        self.max_tokens = max_tokens
        self.dim = self._batch(["dimension"]).shape[1]
        self.digest = digest_fields(
            "remote embedder",
            [
                ("url", self._service.base_url),
                ("model", model),
                ("dim", self.dim),
                ("max_tokens", max_tokens),
                ("query_prefix", query_prefix),
            ],
        )

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        """See :class:`~chunkcache_retriever.embedder.Embedder`; estimated."""
        return [found.span() for found in _TOKEN.finditer(text)]

    def embed(self, texts: Sequence[str], *, is_query: bool = False) -> Vectors:
        """See :class:`~chunkcache_retriever.embedder.Embedder`.

        Raises:
            ServerUnreachableError: The service cannot be reached.
            RemoteServerError: It answers with an error, or with other vectors than it should.
        """
        for text in texts:
            if (num_tokens := len(self.token_spans(text))) > self.max_tokens:
                raise InvalidValueError(
                    f"a text of {num_tokens} tokens, over the embedder's {self.max_tokens}"
                )
        prefix = self._query_prefix if is_query else ""
        rows = [np.zeros((0, self.dim), np.float32)]
        for start in range(0, len(texts), _BATCH_TEXTS):
            rows.append(self._batch([prefix + t for t in texts[start : start + _BATCH_TEXTS]]))
        if any(part.shape[1] != self.dim for part in rows):
            raise RemoteServerError(f"the embedder gave vectors of another width than {self.dim}")
        return np.concatenate(rows)

    def _batch(self, texts: list[str]) -> Vectors:
        body = {"model": self._model, "input": texts, "encoding_format": "float"}
        vectors = _vectors(self._service.post("/embeddings", body), len(texts))
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors / np.maximum(lengths, 1e-30)).astype(np.float32)


def _vectors(answer: Any, num_texts: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The vectors of an answer, in the order of the texts.

    Raises:
        RemoteServerError: They are others than one of equal length per text.
    """
    try:
        found = {int(item["index"]): item["embedding"] for item in answer["data"]}
        vectors = np.array([found[i] for i in range(num_texts)], dtype=np.float64)
    except (TypeError, KeyError, ValueError) as error:
        raise RemoteServerError("the embedder's answer holds no vectors") from error
    if vectors.ndim != 2 or len(found) != num_texts or not vectors.shape[1]:
        raise RemoteServerError(
            f"the embedder gave an array of {list(vectors.shape)} for {num_texts} texts"
        )
    return vectors
