"""The speed evaluation on a tiny model: what it reports adds up. No time is judged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chunkcache.errors import InvalidValueError
from chunkcache.model.loading import LoadedModel
from chunkcache.settings import load_settings
from chunkcache_eval.cli import app
from chunkcache_eval.datasets.records import Passage, Question, demo_questions, read_questions
from chunkcache_eval.memory import measure_memory
from chunkcache_eval.question_choice import QuestionChoice, num_context_tokens
from chunkcache_eval.report import print_speed
from chunkcache_eval.speed import measure_speed

QUESTION = Question(
    "q1",
    "Who keeps the key?",
    ("the baker",),
    (
        Passage("p1", "The key is kept by the baker. The door code is 4017."),
        Passage("p2", "The bridge was built in 1902 over the river Alm."),
    ),
)


def _settings(model_dir: Callable[..., Path], cache_dir: Path) -> Any:
    model = model_dir(max_position_embeddings=2048)
    return load_settings(model=str(model), cache_dir=cache_dir, preparation="alone")


def test_a_report_adds_up(
    model_dir: Callable[..., Path], cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = measure_speed(
        [[QUESTION]],
        QuestionChoice(),
        settings=_settings(model_dir, cache_dir),
        policies=[("query", 0.25)],
        repeats=2,
        with_memory=False,
    )
    (run,) = report.runs
    assert run.speedup == pytest.approx(run.full_ttft_ms / run.fused_ttft_ms)
    assert report.speedup_median == run.speedup
    assert run.fused_ttft_ms >= run.load_ms + run.place_ms
    assert run.floor_ms > 0
    assert run.charged_ratio > 0.25, "the probe and the fixed rows are charged"
    assert report.precache_efficiency > 0
    assert report.forward_vs_transformers > 0
    assert json.loads(json.dumps(report.to_dict()))["runs"][0]["policy"] == "query"
    print_speed(report)
    assert "median speed-up" in capsys.readouterr().out


@pytest.mark.slow
def test_memory_is_measured_in_processes_of_their_own(
    model_dir: Callable[..., Path], cache_dir: Path, tmp_path: Path
) -> None:
    from chunkcache.chunk_cache import ChunkCache

    values = _settings(model_dir, cache_dir).model_dump() | {"store": tmp_path / "store"}
    with ChunkCache.open(**values) as cache:
        for passage in QUESTION.passages:
            cache.put(passage.passage_id, passage.text)
    ballast = bytearray(700_000_000)
    ballast[::4096] = b"x" * len(ballast[::4096])
    report = measure_memory(values, QUESTION, [QUESTION])
    assert 50 < report.answer < 700, "what this process holds must not count"
    assert 50 < report.precache_all < 700
    assert report.answer_limit > 600
    assert len(ballast)


def test_questions_are_read_and_bad_lines_named(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    record = {
        "id": "a",
        "question": "?",
        "answers": ["x"],
        "chunks": [{"id": "c", "text": "t" * 440}],
        "meta": {},
    }
    path.write_text(json.dumps(record) + "\n")
    (question,) = read_questions(path)
    assert (question.question_id, question.passages[0].text) == ("a", "t" * 440)
    path.write_text(json.dumps(record) + "\n{}\n")
    with pytest.raises(InvalidValueError, match=r"questions\.jsonl:2"):
        read_questions(path)
    with pytest.raises(InvalidValueError, match="cannot be read"):
        read_questions(tmp_path / "nowhere")


def test_a_size_is_counted_in_the_models_own_tokens(load_tiny: Callable[..., LoadedModel]) -> None:
    tokenizer = load_tiny().tokenizer

    def question(name: str, text: str) -> Question:
        return Question(name, "?", (), (Passage(f"{name}-passage", text),))

    words, digits = question("words", "the key " * 30), question("digits", "4017 9999 " * 24)
    assert len(words.passages[0].text) == len(digits.passages[0].text)
    sizes = {q.question_id: num_context_tokens(q, tokenizer) for q in (words, digits)}
    assert sizes["words"] < sizes["digits"]
    for near, nearest in ((sizes["words"], words), (sizes["digits"], digits)):
        assert QuestionChoice(1, near).of([digits, words], tokenizer) == [nearest]
    assert QuestionChoice(1).of([digits, words], tokenizer) == [digits]
    assert QuestionChoice().of([digits, words], tokenizer) == [digits, words]


def test_the_demo_questions_need_no_file() -> None:
    questions = demo_questions()
    assert len(questions) >= 6
    assert all(len(q.passages) == 3 and q.answers for q in questions)


def test_the_command_explains_itself() -> None:
    result = CliRunner().invoke(app, ["eval", "speed", "--help"])
    assert result.exit_code == 0
    assert "--near-tokens" in result.output
