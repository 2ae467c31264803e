"""Question sets in the project's record form: one JSON object per line.

``{"id", "question", "answers": [...], "chunks": [{"id", "text"}, ...]}``; other fields are left
alone. Knows nothing of models.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from chunkcache.errors import InvalidValueError


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
        answers: Acceptable answers.
        passages: Context in prompt order.
    """

    question_id: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]

    @property
    def estimated_tokens(self) -> int:
        """Context tokens, at 4.4 characters each (measured on English prose, demo model)."""
        return int(sum(len(p.text) for p in self.passages) / 4.4)


def read_questions(path: Path) -> list[Question]:
    """Read a question set.

    Args:
        path: A JSONL file.

    Raises:
        InvalidValueError: A line is not a record; the message names it.
    """
    questions: list[Question] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                questions.append(_question(line, f"{path.name}:{number}"))
    except OSError as error:
        raise InvalidValueError(f"{path} cannot be read: {error.strerror}") from error
    return questions


def _question(line: str, where: str) -> Question:
    try:
        record = json.loads(line)
        return Question(
            question_id=str(record["id"]),
            question=record["question"],
            answers=tuple(record["answers"]),
            passages=tuple(Passage(c["id"], c["text"]) for c in record["chunks"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidValueError(f"{where} is not a question record: {error!r}") from error


def demo_questions() -> list[Question]:
    """The demo corpus's questions over three documents each: short prompts that need no file."""
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
            passages=tuple(passages(record["document_ids"][:3])),
        )
        for index, record in enumerate(records)
    ]
