"""Rows of CSV and JSON Lines: ids, texts, metadata, and rows that are none."""

import csv
import io

from hypothesis import given
from hypothesis import strategies as st

from chunkcache.file_kinds import ReadFault, ReadRow
from chunkcache_retriever.row_readers import MAX_ROW_FAULTS, RowColumns, read_csv, read_jsonl

COLUMNS = RowColumns()


def codes(rows) -> list[str]:
    return [row.code if isinstance(row, ReadFault) else "" for row in rows]


def test_csv_columns_become_id_text_and_typed_metadata() -> None:
    text = 'id,text,year,zip,open,share,note\nt1,"a, ""b""\nc",2020,00700,true,0.5,\n'
    metadata = {"year": 2020, "zip": "00700", "open": True, "share": 0.5}
    assert list(read_csv(text, COLUMNS)) == [ReadRow("t1", 'a, "b"\nc', metadata)]


def test_other_separators_and_columns() -> None:
    columns = RowColumns("number", "body", ("team",))
    rows = list(read_csv("number;body;team;x\n7;one, two;A;9\n", columns))
    assert rows == [ReadRow("7", "one, two", {"team": "A"})]
    assert list(read_csv("text\tid\nhello\t1\n", COLUMNS)) == [ReadRow("1", "hello", {})]


def test_broken_csv_is_said_row_by_row() -> None:
    assert codes(read_csv("id,text\n1,a\n2\n3,c\n", COLUMNS)) == ["", "invalid_row", ""]
    assert codes(read_csv("a,b\n1,2\n", COLUMNS)) == ["missing_column"]
    assert codes(read_csv("", COLUMNS)) == ["missing_column"]
    assert codes(read_csv("text,text\n1,2\n", COLUMNS)) == ["invalid_row"]
    assert codes(read_csv('id,text\n1,"open\n', COLUMNS)) == ["invalid_row"]
    assert len(list(read_csv("id,text\n" + "1\n" * 5_000, COLUMNS))) == MAX_ROW_FAULTS + 1


def test_jsonl_spreads_metadata_out() -> None:
    text = '{"id": 7, "text": "a", "x": [1], "metadata": {"y": null}}\n\n{"text": "b"}\r\n'
    rows = [ReadRow("7", "a", {"x": [1], "y": None}), ReadRow("", "b", {})]
    assert list(read_jsonl(text, COLUMNS)) == rows


def test_broken_jsonl_is_said_line_by_line() -> None:
    lines = ["{", "[]", '{"id": 1}', '{"text": 1}', '{"text": "a", "id": true}', "[" * 100_000]
    expected = ["invalid_row", "invalid_row", "missing_column", *["invalid_row"] * 3, ""]
    assert codes(read_jsonl("\n".join([*lines, '{"text": "z"}']), COLUMNS)) == expected
    assert len(list(read_jsonl("{\n" * 5_000, COLUMNS))) == MAX_ROW_FAULTS + 1


@given(st.lists(st.tuples(st.text(), st.text()), max_size=5))
def test_csv_gives_back_what_was_written(rows: list[tuple[str, str]]) -> None:
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(["id", "text"])
    writer.writerows(rows)
    found = list(read_csv(file.getvalue(), COLUMNS))
    assert found == [ReadRow(name, text, {}) for name, text in rows]
