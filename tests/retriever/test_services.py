"""Embeddings and rerankings of services: what is asked, and what answers are refused."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from chunkcache.errors import InvalidValueError, RemoteServerError, ServerUnreachableError
from chunkcache.identity import ChunkId
from chunkcache.settings import load_settings
from chunkcache_retriever.embedder import embed_long
from chunkcache_retriever.opening import RetrieverParts, open_embedder
from chunkcache_retriever.remote_embedder import RemoteEmbedder
from chunkcache_retriever.rerank.remote_reranker import RemoteReranker
from chunkcache_retriever.rerank.reranker import Candidate
from chunkcache_retriever.retriever import Retriever
from chunkcache_retriever.testing import FixedEmbedder

CANDIDATES = [Candidate(ChunkId(bytes([i]) * 32), f"text {i}", (i,)) for i in range(3)]


class Service:
    """Answers requests, and remembers them."""

    def __init__(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        self.requests: list[httpx.Request] = []
        self._answer = answer
        self.transport = httpx.MockTransport(self._handle)

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(r.content) for r in self.requests]

    def _handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self._answer(json.loads(request.content))
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)


def embeddings(body: dict[str, Any]) -> dict[str, Any]:
    """Vectors of twice the length that they should have, in another order."""
    rows = 2 * FixedEmbedder(dim=32, max_tokens=10_000).embed(body["input"])
    data = [{"index": i, "embedding": row.tolist()} for i, row in enumerate(rows)]
    return {"data": data[::-1], "model": body["model"]}


def test_a_service_embeds_as_a_model_does(shelf, texts_of, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKCACHE_EMBEDDER_API_KEY", "secret")
    service = Service(embeddings)
    embedder = RemoteEmbedder("http://x/v1/", "m", query_prefix="Q: ", transport=service.transport)
    shelf.put("a", *(f"the crane number {i} is green" for i in range(70)))
    shelf.put("b", "the gate is blue")
    assert texts_of(Retriever(shelf, embedder, "dense"), "blue gate", 1) == ["the gate is blue"]
    assert {str(r.url) for r in service.requests} == {"http://x/v1/embeddings"}
    assert {r.headers["authorization"] for r in service.requests} == {"Bearer secret"}
    bodies = service.bodies()
    assert {b["model"] for b in bodies} == {"m"}
    assert max(len(b["input"]) for b in bodies) <= 64
    assert ["Q: blue gate"] in [b["input"] for b in bodies]
    np.testing.assert_allclose(np.linalg.norm(embedder.embed(["x"]), axis=1), 1.0, atol=1e-6)


def test_its_digest_names_what_vectors_depend_on() -> None:
    def digest(**fields: Any) -> bytes:
        given = {"base_url": "http://x/v1", "model": "m"} | fields
        return RemoteEmbedder(**given, transport=Service(embeddings).transport).digest

    others = [
        {"base_url": "http://y/v1"},
        {"model": "n"},
        {"max_tokens": 99},
        {"query_prefix": "q"},
    ]
    assert len({digest(), *(digest(**other) for other in others)}) == 5
    assert digest() == digest(base_url="http://x/v1/")


def test_long_texts_are_embedded_in_windows() -> None:
    service = Service(embeddings)
    embedder = RemoteEmbedder("http://x", "m", max_tokens=16, transport=service.transport)
    text = "Größe 漢字漢字 internationalisation, " * 20 + "needle"
    assert len(embed_long(embedder, text)) > 5
    windows = service.bodies()[-1]["input"]
    assert all(len(embedder.token_spans(w)) <= 16 for w in windows)
    assert windows[-1].endswith("needle")
    assert embedder.token_spans("ab cde") == [(0, 2), (3, 6)]
    with pytest.raises(InvalidValueError, match="tokens"):
        embedder.embed([text])


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"data": []},
        {"data": [{"index": 0, "embedding": []}]},
        {"data": [{"index": 1, "embedding": [1.0]}]},
        {"data": [{"index": 0, "embedding": ["x"]}]},
        [],
        httpx.Response(500, text="oops"),
        httpx.Response(200, text="<html>"),
    ],
)
def test_answers_that_are_no_vectors(answer: Any) -> None:
    with pytest.raises(RemoteServerError):
        RemoteEmbedder("http://x", "m", transport=Service(lambda body: answer).transport)


def test_vectors_of_another_width_than_before() -> None:
    service = Service(
        lambda body: {"data": [{"index": 0, "embedding": [1.0] * len(body["input"][0])}]}
    )
    embedder = RemoteEmbedder("http://x", "m", transport=service.transport)
    with pytest.raises(RemoteServerError, match="width"):
        embedder.embed(["x"])


def test_nobody_there() -> None:
    with pytest.raises(ServerUnreachableError):
        RemoteEmbedder("http://127.0.0.1:9", "m")


def test_a_service_reranks() -> None:
    service = Service(
        lambda body: {
            "results": [
                {"index": i, "relevance_score": float(-i)} for i in range(len(body["documents"]))
            ][::-1]
        }
    )
    reranker = RemoteReranker("http://x/v1", "m", transport=service.transport)
    assert reranker.scores("q", CANDIDATES) == [0.0, -1.0, -2.0]
    (body,) = service.bodies()
    assert body == {
        "model": "m",
        "query": "q",
        "documents": ["text 0", "text 1", "text 2"],
        "top_n": 3,
    }


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"results": [{"index": 0, "relevance_score": 1.0}]},
        {"results": [{"index": i, "relevance_score": None} for i in range(3)]},
        httpx.Response(
            200,
            text='{"results": ['
            + ",".join(f'{{"index": {i}, "relevance_score": NaN}}' for i in range(3))
            + "]}",
        ),
        httpx.Response(429, text="slow down"),
    ],
)
def test_rerankings_that_are_none(answer: Any) -> None:
    reranker = RemoteReranker("http://x", "m", transport=Service(lambda body: answer).transport)
    with pytest.raises(RemoteServerError):
        reranker.scores("q", CANDIDATES)


def test_settings_name_services(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidValueError, match="embedder_model"):
        open_embedder(load_settings(embedder="http://x/v1"))
    monkeypatch.setattr("chunkcache_retriever.minilm.MiniLmEmbedder", FixedEmbedder)
    with pytest.raises(InvalidValueError, match="reranker_model"):
        RetrieverParts(load_settings(reranker="https://x/v1"))


class Backwards:
    """The last passage is the best; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def scores(self, query: str, candidates: Any) -> list[float]:
        self.asked.append(len(candidates))
        return [float(i) for i in range(len(candidates))]


def test_a_reranker_orders_the_best_passages(shelf, embedder) -> None:
    shelf.put("a", *(f"crane {'green ' * i}" for i in range(1, 8)))
    plain = [h.chunk_index for h in Retriever(shelf, embedder).search("green crane", 7)]
    reranker = Backwards()
    retriever = Retriever(shelf, embedder, reranker=reranker, rerank_depth=4)
    hits = retriever.search("green crane", 2)
    assert [h.chunk_index for h in hits] == plain[:4][::-1][:2]
    assert [h.score for h in hits] == [3.0, 2.0]
    assert len(retriever.search("green crane", 6)) == 6
    assert reranker.asked == [4, 6]
    (ref,) = retriever.retrieve("green crane", 2)
    assert set(ref.chunk_indexes or ()) == set(plain[2:4])
