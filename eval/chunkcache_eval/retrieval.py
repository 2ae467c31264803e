"""How often a question's own passages are among the first that retrieval finds.

All passages of the measured questions are one corpus, each a document of one chunk, so that the
retriever alone is measured: no splitter and no language model. Recall@k of a question is the share
of its gold passages among the first k found; the figure is the mean over questions.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from chunkcache.catalog import Catalog
from chunkcache.documents import Chunk, Document, canonical_text
from chunkcache.errors import InvalidValueError
from chunkcache.identity import TokenizerDigest, chunk_id, tenant_namespace
from chunkcache.store.environment import StoreEnvironment
from chunkcache_eval.datasets.records import Passage, Question
from chunkcache_eval.reranking import TOP_K, MeasuredReranker, RerankFigures, recall_of
from chunkcache_retriever.embedder import Embedder
from chunkcache_retriever.ranking import RankingKind
from chunkcache_retriever.retriever import Retriever

OnProgress = Callable[[str], None]

_STORE_BYTES = 8 << 30
_PROGRESS_CHUNKS = 512


@dataclass(frozen=True)
class QuestionSet:
    """Questions of one file.

    Attributes:
        name: The file's.
        questions: Those with gold passages count.
    """

    name: str
    questions: Sequence[Question]


@dataclass(frozen=True)
class RetrievalReport:
    """What was found.

    Attributes:
        recall: Per ranking the recall over all questions, 0 to 1.
        by_set: The same per file.
        num_questions: Per file, those measured.
        num_passages: Of the corpus.
        index_seconds: Embedding and indexing the corpus.
        search_ms: Per ranking the mean time of a search, the question's embedding included.
        rerank: What the served model as reranker of the hybrid ranking does, if measured.
    """

    recall: Mapping[RankingKind, float]
    by_set: Mapping[str, Mapping[RankingKind, float]]
    num_questions: Mapping[str, int]
    num_passages: int
    index_seconds: float
    search_ms: Mapping[RankingKind, float]
    rerank: RerankFigures | None = None

    def to_dict(self) -> dict[str, Any]:
        """One JSON object."""
        return {
            **{f"recall{TOP_K}_{kind}": round(value, 4) for kind, value in self.recall.items()},
            "sets": {
                name: {
                    "questions": self.num_questions[name],
                    **{f"recall{TOP_K}_{kind}": round(v, 4) for kind, v in values.items()},
                }
                for name, values in self.by_set.items()
            },
            "questions": sum(self.num_questions.values()),
            "passages": self.num_passages,
            "index_seconds": round(self.index_seconds, 3),
            "search_ms": {kind: round(value, 3) for kind, value in self.search_ms.items()},
            **({} if self.rerank is None else self.rerank.to_dict()),
        }


def measure_retrieval(
    sets: Sequence[QuestionSet],
    embedder: Embedder,
    *,
    limit: int | None = None,
    reranker: MeasuredReranker | None = None,
    progress: OnProgress = lambda line: None,
) -> RetrievalReport:
    """Measure every ranking over the same corpus.

    Args:
        sets: The questions.
        embedder: Embeds passages and questions.
        limit: Questions per set, from the first with gold passages; None for all.
        reranker: Also rerank the hybrid ranking's best passages.
        progress: Told in lines how far it is.

    Raises:
        InvalidValueError: No question has a gold passage.
    """
    chosen = {s.name: [q for q in s.questions if q.gold_passage_ids][:limit] for s in sets}
    passages = {p.passage_id: p for qs in chosen.values() for q in qs for p in q.passages}
    # What is nowhere in the corpus cannot be found by anything.
    chosen = {
        name: [q for q in questions if passages.keys() >= set(q.gold_passage_ids)]
        for name, questions in chosen.items()
    }
    chosen = {name: questions for name, questions in chosen.items() if questions}
    if not chosen:
        raise InvalidValueError("no question names its gold passages", param="data")
    with (
        tempfile.TemporaryDirectory(prefix="chunkcache-retrieval-") as folder,
        StoreEnvironment.open(Path(folder) / "store", max_bytes=_STORE_BYTES) as env,
    ):
        shelf = _Shelf(Catalog(env, tenant_namespace(env.secret, "retrieval")))
        shelf.put(passages.values())
        started = time.perf_counter()
        found: dict[RankingKind, dict[str, list[float]]] = {}
        search_ms: dict[RankingKind, float] = {}
        index_seconds = 0.0
        for kind in get_args(RankingKind):
            retriever = Retriever(shelf, embedder, kind, _tell_embedded(progress))
            retriever.sync()
            index_seconds = index_seconds or time.perf_counter() - started
            found[kind] = {}
            started = time.perf_counter()
            for name, questions in chosen.items():
                found[kind][name] = [_recall(retriever, question) for question in questions]
                progress(f"{kind}: {len(questions):,} questions of {name}")
            num_searches = sum(map(len, chosen.values()))
            search_ms[kind] = (time.perf_counter() - started) * 1_000 / num_searches
        rerank = None
        if reranker is not None:
            rerank = reranker.measure(Retriever(shelf, embedder), chosen, progress)
    return RetrievalReport(
        recall={k: _mean(v for vs in of.values() for v in vs) for k, of in found.items()},
        by_set={n: {k: _mean(of[n]) for k, of in found.items()} for n in chosen},
        num_questions={name: len(questions) for name, questions in chosen.items()},
        num_passages=len(passages),
        index_seconds=index_seconds,
        search_ms=search_ms,
        rerank=rerank,
    )


@dataclass(frozen=True)
class _Shelf:
    """Passages as documents of one chunk."""

    catalog: Catalog

    def put(self, passages: Iterable[Passage]) -> None:
        tokenizer = TokenizerDigest(bytes(32))
        for passage in passages:
            text = canonical_text(passage.text)
            # The chunk's tokens only name it here: nothing runs a model over them.
            token_ids = tuple(text.encode("utf-8"))
            name = chunk_id(self.catalog.namespace, tokenizer, token_ids)
            chunk = Chunk(name, 0, len(text), token_ids)
            document = Document(passage.passage_id, text, {}, (chunk,), tokenizer, "passage")
            self.catalog.put(document, now=0.0)


def _recall(retriever: Retriever, question: Question) -> float:
    return recall_of(retriever.search(question.question, TOP_K), question)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def _tell_embedded(progress: OnProgress) -> Callable[[int, int], None]:
    def tell(num_done: int, num_chunks: int) -> None:
        if num_done % _PROGRESS_CHUNKS == 0 or num_done == num_chunks:
            progress(f"indexed {num_done:,} of {num_chunks:,} passages")

    return tell
