"""The offline job's evaluation: what it counts, and what the command prints."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chunkcache.errors import InvalidValueError
from chunkcache.text_files import TextItem
from chunkcache_eval.cli import app
from chunkcache_eval.precache import (
    PrecacheReport,
    RunFigures,
    measure_precache,
    spread,
    without_middle_line,
)


def document(number: int, edition: int = 1) -> TextItem:
    lines = [f"Door {number} of house {i} opens at {i + number}." for i in range(12)]
    if edition > 1:
        lines[6] = f"House 6 has a new door since edition {edition}."
    return TextItem(f"d{number}", "\n\n".join(lines))


def test_the_four_steps(open_cache) -> None:
    current = {f"d{i}": document(i, 2 if i < 2 else 1) for i in range(5)}
    previous = {f"d{i}": document(i) for i in range(2)}
    report = measure_precache(open_cache(), current, previous)
    assert report.first.documents == report.second.documents == 5
    assert report.first.prefilled_chunks == report.first.chunks > 5
    assert report.second.prefilled_chunks == 0
    assert report.edits.documents == 2
    assert 0 < report.edits.prefilled_chunks < report.edits.chunks
    assert report.reuse_ratio == 1 - report.edits.prefilled_chunks / report.edits.chunks
    assert min(report.bare_tokens_per_second) > 0
    with pytest.raises(InvalidValueError, match="earlier version"):
        measure_precache(open_cache("other"), current, {})


def test_ratios() -> None:
    first = RunFigures(2, 4, 80, 4, 80, 2.0, 40.0)
    second = RunFigures(2, 4, 80, 0, 0, 0.1, 0.0)
    edits = RunFigures(1, 4, 80, 1, 20, 1.0, 20.0)
    body = PrecacheReport((60.0, 40.0), first, second, edits).to_dict()
    assert (body["bare_ratio"], body["second_ratio"], body["reuse_ratio"]) == (0.8, 0.05, 0.75)


def test_a_limit_takes_documents_from_everywhere() -> None:
    documents = {f"{i:02}": document(i) for i in range(10)}
    assert list(spread(documents, 3)) == ["00", "03", "06"]
    assert spread(documents, None) == spread(documents, 99) == documents


def test_an_earlier_version_lacks_the_middle_line() -> None:
    assert without_middle_line(TextItem("a", "1\n2\n3\n")).text == "1\n3\n"


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, model_dir, cache_dir: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("CHUNKCACHE_MODEL", str(model_dir()))
    monkeypatch.setenv("CHUNKCACHE_CACHE_DIR", str(cache_dir))
    monkeypatch.setenv("CHUNKCACHE_STORE_MAX_BYTES", str(1 << 30))
    monkeypatch.setenv("CHUNKCACHE_PREPARATION", "alone")
    for folder, edition in (("current", 2), ("previous", 1)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(document(1, edition).text)
    (tmp_path / "current" / "b.txt").write_text(document(2).text)
    (tmp_path / "current" / "bad.txt").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    arguments = ["eval", "precache", "--data", str(tmp_path / "current"), "--chunk-tokens", "24"]
    result = CliRunner().invoke(
        app, [*arguments, "--previous", str(tmp_path / "previous"), "--json"]
    )
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert (body["first"]["documents"], body["edits"]["documents"]) == (2, 1)
    assert body["second_prefills"] == 0
    assert 0 < body["reuse_ratio"] < 1
    assert [f["code"] for f in body["failures"]] == ["binary"]
    shown = CliRunner().invoke(app, [*arguments, "--limit", "1"])
    assert "of bare prefill" in shown.stdout
