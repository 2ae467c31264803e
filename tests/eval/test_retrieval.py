"""The retrieval evaluation: what it counts, and what the command prints."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chunkcache.errors import InvalidValueError
from chunkcache_eval import retrieval
from chunkcache_eval.cli import app
from chunkcache_eval.datasets.records import Passage, Question, demo_questions, read_questions
from chunkcache_eval.reranking import MeasuredReranker
from chunkcache_eval.retrieval import QuestionSet, measure_retrieval
from chunkcache_retriever.testing import FixedEmbedder


def question(number: int, gold: tuple[str, ...] = (), word: str = "") -> Question:
    passages = tuple(Passage(f"p{i}", f"passage word{i} of many") for i in range(12))
    text = word or f"where is word{number}"
    return Question(f"q{number}", text, (), passages, gold_passage_ids=gold)


def test_recall_is_the_share_of_gold_among_the_first_five() -> None:
    sets = [
        QuestionSet("one", [question(0, ("p0",)), question(1, ("p1", "p9"), "word1"), question(2)]),
        QuestionSet("two", [question(3, ("p3",))]),
        QuestionSet("none", [question(4), question(5, ("missing",))]),
    ]
    report = measure_retrieval(sets, FixedEmbedder())
    assert report.num_questions == {"one": 2, "two": 1}
    assert report.num_passages == 12
    # By words alone, the other gold passage of q1 shares no word with it.
    assert report.by_set["one"]["bm25"] == 0.75
    assert report.recall["bm25"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert report.by_set["two"]["hybrid"] == 1.0


def test_a_limit_counts_questions_with_gold() -> None:
    questions = [question(0), *(question(i, (f"p{i}",)) for i in range(1, 5))]
    report = measure_retrieval([QuestionSet("s", questions)], FixedEmbedder(), limit=2)
    assert report.num_questions == {"s": 2}
    with pytest.raises(InvalidValueError, match="gold"):
        measure_retrieval([QuestionSet("s", [question(0)])], FixedEmbedder())


def test_gold_passages_are_read(tmp_path: Path) -> None:
    record = {"id": "1", "question": "q", "chunks": [{"id": "a", "text": "t"}]}
    path = tmp_path / "q.jsonl"
    path.write_text(
        json.dumps(record | {"gold_chunk_ids": ["a"]})
        + "\n"
        + json.dumps(record | {"id": "2", "gold_chunk_ids": None})
    )
    assert [q.gold_passage_ids for q in read_questions(path)] == [("a",), ()]
    assert all(q.gold_passage_ids for q in demo_questions())


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunkcache_retriever.minilm.MiniLmEmbedder", FixedEmbedder)
    result = CliRunner().invoke(app, ["eval", "retrieval", "--limit", "2", "--json"])
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert {f"recall5_{kind}" for kind in ("dense", "bm25", "hybrid")} <= body.keys()
    assert body["questions"] == 2
    shown = CliRunner().invoke(app, ["eval", "retrieval", "--limit", "3"])
    assert f"recall@{retrieval.TOP_K}" in shown.stdout


def test_reranking_is_measured(open_cache, model_dir) -> None:
    cache = open_cache(model=model_dir(max_position_embeddings=2048))
    sets = [QuestionSet("one", [question(0, ("p0",)), question(1, ("p1", "p9"), "word1")])]
    reranker = MeasuredReranker(cache, depth=6)
    body = measure_retrieval(sets, FixedEmbedder(), reranker=reranker).to_dict()
    assert 0 <= body["recall5_reranked"] <= body["rerank"]["recall_of_candidates"] <= 1
    assert body["rerank"]["candidates"] == 6
    assert body["rerank"]["sets"].keys() == {"one"}
    assert body["rerank"]["score_ms"] > 0
    # The second time, every candidate's entry was there.
    num_prefills = cache.runtime.stack.stats().prefills
    measure_retrieval(sets, FixedEmbedder(), reranker=reranker)
    assert cache.runtime.stack.stats().prefills == num_prefills
