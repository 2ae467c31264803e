"""Data sets of a quality run: questions under a name, with a digest of where they came from.

Knows files. Knows nothing of models or arms.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chunkcache.errors import InvalidValueError
from chunkcache_eval.datasets.longbench import read_any
from chunkcache_eval.datasets.records import OnBroken, Question, demo_questions


@dataclass(frozen=True)
class QuestionSet:
    """Questions under a name.

    Attributes:
        name: Stem of the data file.
        digest: Of the whole file, however few questions are taken from it.
        questions: In the order of the file.
        further: Questions of the file that are not asked; their passages belong to its corpus.
    """

    name: str
    digest: str
    questions: tuple[Question, ...]
    further: tuple[Question, ...] = ()


def load_sets(paths: Sequence[Path], limit: int | None, on_broken: OnBroken) -> list[QuestionSet]:
    """Read data files; without any, the demo corpus's questions.

    Args:
        paths: JSONL files in any known form.
        limit: Questions to take from the head of each; None is all.
        on_broken: Told of each broken line, which is left out.

    Raises:
        InvalidValueError: A file cannot be read, is of no known form or holds no question; or two
            files have one name.
    """
    if not paths:
        questions = tuple(demo_questions())
        return [_cut("demo", _digest(repr(questions).encode()), questions, limit)]
    names = [path.stem for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise InvalidValueError(f"more than one data file is named {name!r}", param="data")
    return [_load(path, limit, on_broken) for path in paths]


def _load(path: Path, limit: int | None, on_broken: OnBroken) -> QuestionSet:
    questions = read_any(path, on_broken)
    if not questions:
        raise InvalidValueError(f"{path.name} holds no sound question", param="data")
    return _cut(path.stem, _digest(path.read_bytes()), tuple(questions), limit)


def _cut(name: str, digest: str, questions: tuple[Question, ...], limit: int | None) -> QuestionSet:
    asked = questions[:limit]
    return QuestionSet(name, digest, asked, questions[len(asked) :])


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
