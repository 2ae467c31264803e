"""Question sets in the project's record form: one JSON object per line.

``{"id", "question", "answers": [...], "chunks": [{"id", "text"}, ...], "gold_chunk_ids": [...],
"source", "meta": {...}}``;
other fields are left alone, and all from "answers" on but "chunks" may be missing. Knows nothing
of models.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from chunkcache.errors import InvalidValueError

RECORD_FIELDS = ("id", "question", "chunks")
"""Fields that every record has."""

OnBroken = Callable[[str], None]
"""Told of each line that is left out: file, line number and reason."""


@dataclass(frozen=True)
class Passage:
    """A piece of context; the same text has the same id wherever it recurs."""

    passage_id: str
    text: str


@dataclass(frozen=True)
class Question:
    """A question over some passages.

    Attributes:
        question_id: Unique in its file.
        question: The text.
        answers: Acceptable answers; none where nobody knows them.
        passages: Context in prompt order.
        task: What kind of question it is; empty where the file doesn't say.
        needs_all_answers: Whether a right answer names all of ``answers``, not one of them.
        gold_passage_ids: Passages that hold the answer; none where nobody knows them.
    """

    question_id: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]
    task: str = ""
    needs_all_answers: bool = False
    gold_passage_ids: tuple[str, ...] = ()


def read_questions(path: Path, on_broken: OnBroken | None = None) -> list[Question]:
    """Read a question set.

    Args:
        path: A JSONL file.
        on_broken: Told of each broken line, which is left out. Without it, the first one ends the
            reading.

    Raises:
        InvalidValueError: The file cannot be read, or a line is not a record; the message names
            the line.
    """
    return parse_lines(path, parse_record, on_broken)


def parse_lines(
    path: Path, parse: Callable[[dict[str, Any]], Question], on_broken: OnBroken | None = None
) -> list[Question]:
    """Read a file of one JSON object per line; blank lines are no records.

    Args:
        path: The file.
        parse: Makes a question of an object; raises ValueError, KeyError or TypeError if it is
            none.
        on_broken: As in :func:`read_questions`.

    Raises:
        InvalidValueError: As in :func:`read_questions`.
    """
    questions: list[Question] = []
    line_of: dict[str, int] = {}
    for number, line in read_lines(path):
        where = f"{path.name}:{number}"
        try:
            question = parse(parse_object(line))
            first = line_of.setdefault(question.question_id, number)
            if first != number:
                raise ValueError(f"line {first} has the id {question.question_id!r} already")
        except (ValueError, KeyError, TypeError) as error:
            message = f"{where} is not a question record: {_reason(error)}"
            if on_broken is None:
                raise InvalidValueError(message, param="data") from error
            on_broken(message)
        else:
            questions.append(question)
    return questions


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers from 1.

    Raises:
        InvalidValueError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise InvalidValueError(f"{path} cannot be read: {error.strerror}", param="data") from error


def parse_object(line: bytes) -> dict[str, Any]:
    """One line's JSON object.

    Raises:
        ValueError: It isn't one.
    """
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    return record


def parse_record(record: dict[str, Any]) -> Question:
    """A question from a record.

    Raises:
        ValueError: A field is of the wrong form.
        KeyError: A field is missing.
    """
    meta = record.get("meta") or {}
    if not isinstance(meta, dict):
        raise ValueError("'meta' is not an object")
    chunks = record["chunks"]
    if not isinstance(chunks, list) or not chunks or not all(isinstance(c, dict) for c in chunks):
        raise ValueError("'chunks' is not a list of at least one object")
    return Question(
        question_id=str(record["id"]),
        question=text_field(record, "question"),
        answers=text_list(record, "answers"),
        passages=tuple(Passage(str(c["id"]), text_field(c, "text")) for c in chunks),
        task=str(meta.get("task") or record.get("source") or ""),
        needs_all_answers=meta.get("answer_mode") == "all",
        gold_passage_ids=text_list(record, "gold_chunk_ids"),
    )


def text_field(record: dict[str, Any], name: str) -> str:
    """A field that holds a text.

    Raises:
        ValueError: It holds something else.
        KeyError: It is missing.
    """
    value = record[name]
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is not a text")
    return value


def text_list(record: dict[str, Any], name: str) -> tuple[str, ...]:
    """A field that holds texts; missing and null are none.

    Raises:
        ValueError: It holds something else.
    """
    values = record.get(name)
    if values is None:
        return ()
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise ValueError(f"{name!r} is not a list of texts")
    return tuple(values)


def _reason(error: Exception) -> str:
    return f"it has no field {error}" if isinstance(error, KeyError) else str(error)


def demo_questions(num_documents: int = 3) -> list[Question]:
    """The demo corpus's questions over a few documents each: short prompts that need no file."""
    folder = files("chunkcache_api") / "demo_corpus"
    records = json.loads((folder / "questions.json").read_text(encoding="utf-8"))["questions"]

    def passages(ids: list[str]) -> Iterator[Passage]:
        for name in ids:
            yield Passage(name, (folder / f"{name}.md").read_text(encoding="utf-8"))

    return [
        Question(
            question_id=f"demo-{index}",
            question=record["question"],
            answers=tuple(record["answers"]),
            passages=tuple(passages(record["document_ids"][:num_documents])),
            gold_passage_ids=tuple(record["gold_document_ids"]),
        )
        for index, record in enumerate(records)
    ]
