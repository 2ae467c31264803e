"""Rows of CSV and JSON Lines as documents: which column holds what. Knows texts, not files.

CSV has no types, so a value that is written as a number or as ``true`` or ``false`` becomes one,
unless that would change how it is written (``007`` stays a text). An empty cell is left out.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from chunkcache.documents import JsonValue
from chunkcache.file_kinds import ReadFault, ReadRow

MAX_CELL_CHARS = 32 << 20
MAX_ROW_FAULTS = 1_000
"""Broken rows that are reported one by one; behind these the file is given up."""


@dataclass(frozen=True)
class RowColumns:
    """Which columns (or JSON fields) hold what.

    Attributes:
        document_id: The row's id; a row without it is named by its file and number.
        text: The text.
        metadata: The columns to keep as metadata; None keeps all others.
    """

    document_id: str = "id"
    text: str = "text"
    metadata: tuple[str, ...] | None = None


def read_csv(text: str, columns: RowColumns) -> Iterator[ReadRow | ReadFault]:
    """Rows of a CSV file whose first row names the columns.

    The separator is the one of comma, semicolon and tab that stands most often in the first row.
    """
    csv.field_size_limit(MAX_CELL_CHARS)
    first = text.partition("\n")[0]
    separator = max(",;\t", key=first.count)
    # The reader wants lines as they were written: a quoted cell may hold ends of lines.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        names = next(reader, [])
        if columns.text not in names:
            yield ReadFault("missing_column", _no_column(columns.text, names))
            return
        if len(set(names)) < len(names):
            yield ReadFault("invalid_row", "names a column twice")
            return
        num_faults = 0
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(names):
                yield ReadFault("invalid_row", f"has {len(cells)} cells, not {len(names)}")
                num_faults += 1
                if num_faults == MAX_ROW_FAULTS:
                    yield _given_up()
                    return
                continue
            row = dict(zip(names, cells, strict=True))
            rest = {k: _typed(v) for k, v in row.items() if v}
            yield _row(row.get(columns.document_id, ""), row[columns.text], rest, columns)
    except csv.Error as error:
        yield ReadFault("invalid_row", f"is not CSV: {error}")


def read_jsonl(text: str, columns: RowColumns) -> Iterator[ReadRow | ReadFault]:
    """Rows of JSON Lines: one object a line; an object in ``metadata`` is spread out."""
    num_faults = 0
    for line in text.split("\n"):
        if not line.strip():
            continue
        row = _json_row(line, columns)
        yield row
        num_faults += isinstance(row, ReadFault)
        if num_faults == MAX_ROW_FAULTS:
            yield _given_up()
            return


def _given_up() -> ReadFault:
    return ReadFault("invalid_row", f"is given up behind {MAX_ROW_FAULTS:,} broken rows")


def _json_row(line: str, columns: RowColumns) -> ReadRow | ReadFault:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return ReadFault("invalid_row", f"is not JSON: {type(error).__name__}")
    if not isinstance(row, dict):
        return ReadFault("invalid_row", "is not a JSON object")
    text, name = row.get(columns.text), row.get(columns.document_id, "")
    if text is None:
        return ReadFault("missing_column", _no_column(columns.text, list(row)))
    if not isinstance(text, str):
        return ReadFault("invalid_row", f"holds no text in {columns.text!r}")
    if isinstance(name, bool) or not isinstance(name, str | int):
        return ReadFault("invalid_row", f"holds neither text nor number in {columns.document_id!r}")
    rest: dict[str, Any] = dict(row)
    if isinstance(nested := rest.get("metadata"), dict):
        del rest["metadata"]
        rest |= nested
    return _row(str(name), text, rest, columns)


def _row(
    document_id: str, text: str, rest: Mapping[str, JsonValue], columns: RowColumns
) -> ReadRow:
    taken = (columns.document_id, columns.text)
    kept = rest.keys() - taken if columns.metadata is None else set(columns.metadata)
    return ReadRow(document_id, text, {k: v for k, v in rest.items() if k in kept})


def _typed(value: str) -> JsonValue:
    if value in ("true", "false"):
        return value == "true"
    for kind in (int, float):
        try:
            number = kind(value)
        except ValueError:
            continue
        if str(number) == value and number - number == 0:
            return number
    return value


def _no_column(wanted: str, names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:20]))
    return f"has no column {wanted!r}; its columns are {shown or 'none'}"
