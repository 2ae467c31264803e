"""Question sets are read in either form; broken lines are named and the rest goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkcache.errors import InvalidValueError
from chunkcache_eval.datasets.longbench import cut_context, read_any, read_longbench
from chunkcache_eval.datasets.records import read_questions

RECORD: dict[str, Any] = {
    "id": "r1",
    "question": "Who?",
    "answers": ["x", "y"],
    "chunks": [{"id": "c", "text": "x did"}],
    "source": "made up",
}
LONG: dict[str, Any] = {
    "_id": "l1",
    "input": "Who?",
    "context": "Passage 1:\nA\nx did\n\nPassage 2:\nB\ny did not\n",
    "answers": ["x"],
    "length": 9,
    "dataset": "hotpotqa",
    "language": "en",
}


def _write(path: Path, *lines: object) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    return path


def test_a_longbench_record(tmp_path: Path) -> None:
    (question,) = read_longbench(_write(tmp_path / "q.jsonl", LONG))
    assert [p.text for p in question.passages] == [
        "Passage 1:\nA\nx did\n\n",
        "Passage 2:\nB\ny did not\n",
    ]
    assert [p.passage_id for p in question.passages] == ["l1/0", "l1/1"]
    assert (question.task, question.answers, question.question) == ("hotpotqa", ("x",), "Who?")


def test_paragraphs_are_grouped_where_there_are_no_headings() -> None:
    paragraphs = [f"{letter * 600}\n\n" for letter in "abcde"] + ["f" * 4000]
    assert [len(p) for p in cut_context("".join(paragraphs))] == [1204, 1204, 602, 4000]


def test_text_in_front_of_the_first_heading_is_a_passage() -> None:
    assert cut_context("Intro.\nPassage 1:\nA\n") == ["Intro.\n", "Passage 1:\nA\n"]
    assert cut_context("\n\nPassage 1:\nA") == ["\n\nPassage 1:\nA"]


@given(st.lists(st.sampled_from(["a" * 700, "\n", "\n\n", " ", "Passage 3:", "b\n"]), min_size=1))
def test_cutting_loses_nothing_and_leaves_no_blank(pieces: list[str]) -> None:
    context = "".join([*pieces, "end"])
    passages = cut_context(context)
    assert "".join(passages) == context
    assert all(p.strip() for p in passages)


def test_the_form_is_told_by_the_first_sound_record(tmp_path: Path) -> None:
    records = _write(tmp_path / "r.jsonl", "not json", {"id": "half"}, RECORD)
    broken: list[str] = []
    (question,) = read_any(records, broken.append)
    assert (question.question_id, question.task) == ("r1", "made up")
    assert len(broken) == 2
    (question,) = read_any(_write(tmp_path / "l.jsonl", "", LONG))
    assert question.question_id == "l1"


@pytest.mark.parametrize(
    ("line", "found"), [({"prompt": "?", "text": "!"}, "prompt, text"), ("nothing", "no JSON")]
)
def test_an_unknown_form_names_the_known_ones(tmp_path: Path, line: object, found: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        read_any(_write(tmp_path / "u.jsonl", line))
    message = caught.value.message
    assert found in message
    assert "id, question, chunks" in message
    assert "_id, input, context" in message


BROKEN = [
    ("{", "Expecting"),
    ("[1]", "not a JSON object"),
    ("[" * 100_000, "nested"),
    ({k: v for k, v in RECORD.items() if k != "question"}, "no field 'question'"),
    (RECORD | {"answers": "x"}, "'answers'"),
    (RECORD | {"chunks": []}, "'chunks'"),
    (RECORD | {"chunks": [{"id": "c", "text": 3}]}, "'text'"),
    (RECORD | {"meta": 3}, "'meta'"),
    (RECORD, "line 1 has the id 'r1' already"),
]


@pytest.mark.parametrize(("line", "reason"), BROKEN)
def test_a_broken_line_is_named_and_the_rest_goes_on(
    tmp_path: Path, line: object, reason: str
) -> None:
    path = _write(tmp_path / "q.jsonl", RECORD, line, RECORD | {"id": "r3"})
    broken: list[str] = []
    assert [q.question_id for q in read_questions(path, broken.append)] == ["r1", "r3"]
    (message,) = broken
    assert message.startswith("q.jsonl:2 is not a question record")
    assert reason in message
    with pytest.raises(InvalidValueError, match=r"q\.jsonl:2"):
        read_questions(path)


def test_bytes_that_are_no_text_break_their_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(b"\xff\xfe{}\n" + json.dumps(RECORD).encode() + b"\n")
    broken: list[str] = []
    assert len(read_any(path, broken.append)) == 1
    assert len(broken) == 1


@pytest.mark.parametrize("answers", [{}, {"answers": None}, {"answers": []}])
def test_answers_may_be_missing(tmp_path: Path, answers: dict[str, Any]) -> None:
    record = {k: v for k, v in RECORD.items() if k != "answers"} | answers
    (question,) = read_questions(_write(tmp_path / "q.jsonl", record))
    assert question.answers == ()


def test_the_task_and_whether_all_answers_are_needed(tmp_path: Path) -> None:
    meta = {"task": "niah_multivalue", "answer_mode": "all"}
    (question,) = read_questions(_write(tmp_path / "q.jsonl", RECORD | {"meta": meta}))
    assert (question.task, question.needs_all_answers) == ("niah_multivalue", True)
    (question,) = read_questions(_write(tmp_path / "q.jsonl", RECORD))
    assert not question.needs_all_answers
