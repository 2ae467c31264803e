"""``chunkcache precache`` with neighbours: stored first, then prepared, and told so."""

from pathlib import Path

import pytest

from chunkcache.precache import PrecacheProgress, TextItem
from chunkcache_api.cli.precache_display import PrecacheDisplay
from chunkcache_api.cli.precache_meter import PrecacheMeter, SizedItem
from chunkcache_retriever.testing import FixedEmbedder

PREPARATION = ("--preparation", "neighbours(2)")


@pytest.fixture(autouse=True)
def fixed_embedder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunkcache_retriever.minilm.MiniLmEmbedder", FixedEmbedder)


def test_a_folder_is_prepared_once(cli, cli_json, write_documents, store: Path) -> None:
    folder = write_documents(6)
    first = cli_json("precache", folder, *PREPARATION)
    assert (first["created"], first["prefilled_chunks"]) == (6, 6)
    assert first["without_neighbours"] == 0
    assert first["prefill_rows_per_token"] == pytest.approx(
        first["prefill_rows"] / first["prefilled_tokens"]
    )
    # Two neighbours and the opening, and itself; chunks with the same neighbours may share them.
    assert first["prefill_rows_per_token"] > 1.3
    second = cli_json("precache", folder, *PREPARATION)
    assert (second["unchanged"], second["prefilled_chunks"]) == (6, 0)

    (folder / "002.txt").write_text("Another text altogether.", encoding="utf-8")
    result = cli("precache", folder, *PREPARATION)
    assert result.exit_code == 0
    assert "1 changed, 5 unchanged" in result.stdout
    assert "tokens run per chunk token" in result.stdout
    asked = cli_json(
        "ask", "Which code?", "--doc", "001.txt", "--max-tokens", "2", "--ratio", "0.1",
        *PREPARATION,
    )  # fmt: skip
    assert asked["chunkcache"]["preparation"] == "neighbours(2)"
    assert asked["chunkcache"]["warnings"] == []


def test_one_document_has_no_neighbours_and_is_said_to(cli, write_documents) -> None:
    result = cli("precache", write_documents(1), *PREPARATION)
    assert result.exit_code == 0
    assert "1 chunks have no neighbours" in result.stdout


def test_the_demo_and_the_other_commands_take_it(cli_json, settings_env, tmp_path: Path) -> None:
    settings_env.setenv("CHUNKCACHE_CACHE_DIR", str(tmp_path / "cache"))
    body = cli_json("demo", "--questions", "1", "--preparation", "neighbours(1)")
    assert body["preparation"] == "neighbours(1)"
    assert body["prefilled_chunks"] > 12


def test_too_many_neighbours_are_an_error(cli_json, write_documents) -> None:
    folder = write_documents(1)
    body = cli_json("precache", folder, "--preparation", "neighbours(17)", exit_code=1)
    assert body["error"]["code"] == "invalid_value"
    assert "1 to 16" in body["error"]["message"]


def _progress(**fields: int) -> PrecacheProgress:
    zeros = {"documents": 0, "prefilled_chunks": 0, "prefilled_tokens": 0, "failures": 0}
    return PrecacheProgress(item="a", tokens_per_second=0.0, **(zeros | fields))


def test_the_second_phase_is_measured_by_its_chunks() -> None:
    now = [0.0]
    items = [SizedItem(TextItem("x", "x"), 100)] * 2
    meter = PrecacheMeter(items, clock=lambda: now[0])
    meter.take(_progress(documents=2))
    assert meter.remaining_seconds is None
    second = {"documents": 2, "chunks_to_prepare": 20}
    meter.take(_progress(**second, prepared_chunks=10))
    assert meter.reached_bytes == 100
    assert meter.remaining_seconds is None, "those had entries, which says nothing"
    now[0] = 8.0
    meter.take(_progress(**second, prepared_chunks=14, prefilled_tokens=400))
    assert meter.reached_bytes == 140
    assert meter.tokens_per_second == 50
    assert meter.remaining_seconds == pytest.approx(6 * 8 / 4)
    now[0] = 9.0
    meter.take(_progress(**second, prepared_chunks=30, prefilled_tokens=500, failures=3))
    assert (meter.reached_bytes, meter.remaining_seconds) == (200, 0)


def test_the_display_names_the_phase(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    monkeypatch.setattr("chunkcache_api.cli.precache_display.say", said.append)
    monkeypatch.setattr("chunkcache_api.cli.precache_display.LINE_INTERVAL_SECONDS", 0.0)
    with PrecacheDisplay(PrecacheMeter([SizedItem(TextItem("x", "x"), 100)])) as display:
        display.take(_progress(documents=1))
        display.note("embedded 64 of 70 chunks")
        display.take(_progress(documents=1, chunks_to_prepare=9, prepared_chunks=4))
    assert "1/1 documents" in said[0]
    assert said[1] == "embedded 64 of 70 chunks"
    assert "4/9 chunks looked at" in said[2]
