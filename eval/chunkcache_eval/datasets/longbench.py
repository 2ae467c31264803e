"""Question sets in LongBench's form: one JSON object per line, its context one long text.

``{"_id", "input", "context", "answers": [...], "dataset", "length"}``; answers, dataset and length
may be missing. The context is cut into passages here, because a cache holds passages. Knows
nothing of models.
"""

import re
from pathlib import Path
from typing import Any

from chunkcache.errors import InvalidValueError
from chunkcache_eval.datasets.records import (
    RECORD_FIELDS,
    OnBroken,
    Passage,
    Question,
    parse_lines,
    parse_object,
    parse_record,
    read_lines,
    text_field,
    text_list,
)

LONGBENCH_FIELDS = ("_id", "input", "context")
"""Fields that every record has."""

PASSAGE_CHARS = 1500
"""About how long passages are where the context has no headings."""

_HEADING = re.compile(r"^(?=Passage \d+:)", re.MULTILINE)
_PARAGRAPH = re.compile(r"(?<=\n)(?!\n)")


def parse_longbench(record: dict[str, Any]) -> Question:
    """A question from a record in LongBench's form.

    Raises:
        ValueError: A field is of the wrong form.
        KeyError: A field is missing.
    """
    question_id = str(record["_id"])
    context = text_field(record, "context")
    if not context.strip():
        raise ValueError("'context' is empty")
    return Question(
        question_id=question_id,
        question=text_field(record, "input"),
        answers=text_list(record, "answers"),
        passages=tuple(
            Passage(f"{question_id}/{index}", text)
            for index, text in enumerate(cut_context(context))
        ),
        task=str(record.get("dataset") or ""),
    )


def cut_context(context: str) -> list[str]:
    """Cut a context into passages; joined, they are the context, and none is blank.

    Cut at the headings "Passage 1:" and so on where there are any, else between paragraphs, so
    that a passage has about :data:`PASSAGE_CHARS` characters; a longer paragraph stays whole.

    Args:
        context: Not blank.
    """
    by_heading = _HEADING.split(context)
    if len(by_heading) > 1:
        return _grouped(by_heading, 0)
    return _grouped(_PARAGRAPH.split(context), PASSAGE_CHARS)


def _grouped(pieces: list[str], num_chars: int) -> list[str]:
    """Join neighbours while they stay within a size; blank ones go with a neighbour."""
    groups: list[str] = []
    for piece in pieces:
        fits = bool(groups) and len(groups[-1]) + len(piece) <= num_chars
        if groups and (fits or not piece.strip() or not groups[-1].strip()):
            groups[-1] += piece
        else:
            groups.append(piece)
    return groups


_FORMATS = {
    "records": (RECORD_FIELDS, parse_record),
    "LongBench": (LONGBENCH_FIELDS, parse_longbench),
}


def read_longbench(path: Path, on_broken: OnBroken | None = None) -> list[Question]:
    """Read a question set in LongBench's form. Arguments and errors as of ``read_questions``."""
    return parse_lines(path, parse_longbench, on_broken)


def read_any(path: Path, on_broken: OnBroken | None = None) -> list[Question]:
    """Read a question set in whichever known form it has.

    Args:
        path: A JSONL file.
        on_broken: As of ``read_questions``.

    Raises:
        InvalidValueError: The file cannot be read or has none of the known forms; or, without
            ``on_broken``, a line is broken.
    """
    seen: list[str] = []
    for _, line in read_lines(path):
        try:
            record = parse_object(line)
        except ValueError:
            continue
        for fields, parse in _FORMATS.values():
            if all(field in record for field in fields):
                return parse_lines(path, parse, on_broken)
        seen = seen or sorted(record)
    known = "; ".join(f"{name} ({', '.join(fields)})" for name, (fields, _) in _FORMATS.items())
    found = f"its records have {', '.join(seen)}" if seen else "it holds no JSON object"
    raise InvalidValueError(
        f"{path.name} is no question set: {found}; known forms and their fields: {known}",
        param="data",
    )
