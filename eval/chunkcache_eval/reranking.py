"""What reranking with the served model gains, and what it costs.

The candidates of a question are scored twice: the first time, what has no entry is prefilled; the
second time all are kept, as they are for a corpus that is pre-cached.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chunkcache.chunk_cache import ChunkCache
from chunkcache.documents import Chunk, Document, canonical_text
from chunkcache.identity import chunk_id
from chunkcache_eval.datasets.records import Question
from chunkcache_retriever.rerank.kv_reranker import KvReranker
from chunkcache_retriever.rerank.reranker import DEFAULT_DEPTH, Candidate
from chunkcache_retriever.retriever import ChunkHit, Retriever

TOP_K = 5
_TOLD_QUESTIONS = 10


@dataclass(frozen=True)
class RerankFigures:
    """Over all questions.

    Attributes:
        recall: Recall at five behind the reranker.
        recall_of_candidates: Recall of all candidates: what no reranker of them can exceed.
        by_set: Recall at five per file.
        score_ms: Mean time to score a question's candidates, all of them kept.
        prefill_ms: Mean time that the missing ones took on top.
        num_candidates: Mean number of candidates.
    """

    recall: float
    recall_of_candidates: float
    by_set: Mapping[str, float]
    score_ms: float
    prefill_ms: float
    num_candidates: float

    def to_dict(self) -> dict[str, Any]:
        """Fields of the report's JSON object."""
        return {
            f"recall{TOP_K}_reranked": round(self.recall, 4),
            "rerank": {
                "recall_of_candidates": round(self.recall_of_candidates, 4),
                "sets": {name: round(value, 4) for name, value in self.by_set.items()},
                "score_ms": round(self.score_ms, 2),
                "prefill_ms": round(self.prefill_ms, 2),
                "candidates": round(self.num_candidates, 2),
            },
        }


def recall_of(hits: Sequence[ChunkHit], question: Question) -> float:
    """Share of a question's gold passages among some hits."""
    found = {name for h in hits for name in (h.document_id, *(d for d, _ in h.also_in))}
    gold = set(question.gold_passage_ids)
    return len(gold & found) / len(gold)


class MeasuredReranker:
    """Measures the reranker over a cache's model.

    Args:
        cache: Its model scores; the passages become its documents.
        depth: Candidates of a question.
    """

    def __init__(self, cache: ChunkCache, depth: int = DEFAULT_DEPTH) -> None:
        self._cache = cache
        self._reranker = KvReranker(cache)
        self._depth = depth
        self._stored: set[str] = set()

    def measure(
        self,
        retriever: Retriever,
        sets: Mapping[str, Sequence[Question]],
        progress: Callable[[str], None],
    ) -> RerankFigures:
        """Rerank what a retriever finds.

        Args:
            retriever: Gives the candidates.
            sets: Questions with gold passages, by file.
            progress: Told in lines how far it is.
        """
        recalls: dict[str, list[float]] = {name: [] for name in sets}
        of_candidates: list[float] = []
        seconds: list[tuple[float, float]] = []
        num_candidates = 0
        for name, questions in sets.items():
            for question in questions:
                hits = retriever.search(question.question, self._depth)
                candidates = [self._candidate(h) for h in hits]
                times = []
                scores: list[float] = []
                for _ in range(2):
                    started = time.perf_counter()
                    scores = self._reranker.scores(question.question, candidates)
                    times.append(time.perf_counter() - started)
                best = sorted(range(len(hits)), key=lambda i: -scores[i])[:TOP_K]
                recalls[name].append(recall_of([hits[i] for i in best], question))
                of_candidates.append(recall_of(hits, question))
                seconds.append((times[0], times[1]))
                num_candidates += len(hits)
                if len(seconds) % _TOLD_QUESTIONS == 0:
                    progress(f"reranked: {len(seconds):,} questions")
        every = [value for values in recalls.values() for value in values]
        num_questions = len(every)
        score_ms = sum(kept for _, kept in seconds) * 1e3 / num_questions
        first_ms = sum(first for first, _ in seconds) * 1e3 / num_questions
        return RerankFigures(
            recall=sum(every) / num_questions,
            recall_of_candidates=sum(of_candidates) / num_questions,
            by_set={name: sum(v) / len(v) for name, v in recalls.items()},
            score_ms=score_ms,
            prefill_ms=max(0.0, first_ms - score_ms),
            num_candidates=num_candidates / num_questions,
        )

    def _candidate(self, hit: ChunkHit) -> Candidate:
        """The passage as a chunk of a document of its own, so that its entry is kept."""
        catalog, tokenizer = self._cache.catalog, self._cache.runtime.model.tokenizer
        text = canonical_text(hit.text)
        token_ids = tokenizer.encode_content(text)
        name = chunk_id(catalog.namespace, tokenizer.digest, token_ids)
        if hit.document_id not in self._stored:
            self._stored.add(hit.document_id)
            chunk = Chunk(name, 0, len(text), token_ids)
            document = Document(hit.document_id, text, {}, (chunk,), tokenizer.digest, "passage")
            catalog.put(document, now=0.0)
        return Candidate(name, text, token_ids)
