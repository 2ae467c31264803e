"""Reranking by a service with a ``/v1/rerank``, as Jina, Cohere, vLLM and others have it."""

import math
from collections.abc import Sequence
from typing import Final

import httpx

from chunkcache.errors import RemoteServerError
from chunkcache_retriever.json_service import JsonService
from chunkcache_retriever.rerank.reranker import Candidate

API_KEY_VARIABLE: Final = "CHUNKCACHE_RERANKER_API_KEY"


class RemoteReranker:
    """A reranker behind a service.

    Args:
        base_url: For example ``http://localhost:8080/v1``.
        model: The model's name there.
        transport: HTTP transport, for tests.
    """

    def __init__(
        self, base_url: str, model: str, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._service = JsonService(base_url, API_KEY_VARIABLE, transport=transport)
        self._model = model

    def scores(self, query: str, candidates: Sequence[Candidate]) -> list[float]:
        """See :class:`~chunkcache_retriever.rerank.reranker.Reranker`: the service's relevances.

        Raises:
            ServerUnreachableError: The service cannot be reached.
            RemoteServerError: It answers with an error, or does not score every passage.
        """
        body = {
            "model": self._model,
            "query": query,
            "documents": [c.text for c in candidates],
            "top_n": len(candidates),
        }
        answer = self._service.post("/rerank", body)
        try:
            found = {int(r["index"]): float(r["relevance_score"]) for r in answer["results"]}
            scores = [found[i] for i in range(len(candidates))]
        except (TypeError, KeyError, ValueError) as error:
            raise RemoteServerError("the reranker's answer does not score every passage") from error
        if not all(map(math.isfinite, scores)):
            raise RemoteServerError("the reranker gave scores that are not finite")
        return scores
