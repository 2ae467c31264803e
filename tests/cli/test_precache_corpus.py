"""``chunkcache precache`` over files of every kind: shares, estimates, limits, and what is gone."""

import json
from collections.abc import Callable
from pathlib import Path

import docx
import pytest

from chunkcache.text_files import SOURCE_KEY
from chunkcache_api.cli.corpus import Shard


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A folder with a document of each kind that has to be parsed."""
    folder = tmp_path / "mixed"
    (folder / "sub").mkdir(parents=True)
    (folder / "page.html").write_text("<title>Page</title><h1>Valves</h1><p>Turn left.")
    document = docx.Document()
    document.add_paragraph("A paragraph.")
    document.save(str(folder / "sub" / "letter.docx"))
    (folder / "tickets.csv").write_text(
        "id,text,year\nT1,The pump leaks,2023\nT2,It is loud,2024\n"
    )
    lines = [{"id": "J1", "text": "A line", "team": "red"}, {"text": "Another line"}, {"id": "J3"}]
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "photo.txt").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    (folder / "broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    return folder


def documents_of(read_store, store: Path):
    return read_store(store)[0]


def test_files_of_every_kind(cli_json, mixed: Path, read_store, store: Path) -> None:
    summary = cli_json("precache", mixed, exit_code=3)
    assert {f["item"]: f["code"] for f in summary["failures"]} == {
        "photo.txt": "binary",
        "broken.pdf": "unreadable",
        "lines.jsonl#3": "missing_column",
    }
    found = documents_of(read_store, store)
    assert {name: d.text for name, d in found.items()} == {
        "page.html": "# Valves\n\nTurn left.",
        "sub/letter.docx": "A paragraph.",
        "T1": "The pump leaks",
        "T2": "It is loud",
        "J1": "A line",
        "lines.jsonl#2": "Another line",
    }
    assert found["page.html"].metadata["title"] == "Page"
    assert found["T1"].metadata["year"] == 2023
    assert found["J1"].metadata["team"] == "red"
    assert found["T1"].metadata[SOURCE_KEY]["path"] == "tickets.csv"
    again = cli_json("precache", mixed, exit_code=3)
    assert (again["unchanged"], again["prefilled_chunks"]) == (6, 0)


def test_columns_can_be_named(cli_json, tmp_path: Path, read_store, store: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("number,body,team,other\n7,Some text,red,x\n")
    options = ("--id-column", "number", "--text-column", "body", "--metadata-column", "team")
    cli_json("precache", path, *options)
    (document,) = documents_of(read_store, store).values()
    assert (document.document_id, document.text) == ("7", "Some text")
    assert document.metadata.keys() == {"team", SOURCE_KEY}


def test_a_dry_run_says_what_a_run_then_does(
    cli_json, cli, write_documents: Callable[[int], Path], read_store, store: Path
) -> None:
    folder = write_documents(6)
    (folder / "bad.txt").write_bytes(b"caf\xe9")
    (folder / "twin.txt").write_text((folder / "000.txt").read_text())
    estimate = cli_json("precache", folder, "--dry-run")
    assert documents_of(read_store, store) == {}
    assert read_store(store)[1] == {}
    assert [f["code"] for f in estimate["failures"]] == ["invalid_encoding"]
    summary = cli_json("precache", folder, exit_code=3)
    assert estimate["documents"] == summary["documents"] == 7
    assert estimate["tokens"] == summary["tokens"]
    assert estimate["new_chunks"] == summary["prefilled_chunks"] == 6
    assert estimate["new_tokens"] == summary["prefilled_tokens"]
    assert estimate["new_bytes"] == sum(map(len, read_store(store)[1].values()))
    assert estimate["seconds"] > 0
    again = cli_json("precache", folder, "--dry-run")
    assert (again["new_chunks"], again["new_bytes"], again["seconds"]) == (0, 0, 0.0)
    assert "the rest is cached" in cli("precache", folder, "--dry-run").stdout


def test_shards_share_a_corpus(
    cli_json, write_documents: Callable[[int], Path], read_store, store: Path
) -> None:
    folder = write_documents(12)
    counts = [cli_json("precache", folder, "--shard", f"{i}/3")["documents"] for i in (1, 2, 3)]
    assert sum(counts) == 12
    assert all(0 < count < 12 for count in counts)
    assert len(documents_of(read_store, store)) == 12


@pytest.mark.parametrize("text", ["", "0/3", "4/3", "1", "1/0", "a/b", "-1/2", "1/2/3"])
def test_a_shard_that_is_none_is_wrong_usage(cli, write_documents, text: str) -> None:
    result = cli("precache", write_documents(1), "--shard", text)
    assert result.exit_code == 2
    assert "i/n" in result.stderr


def test_each_item_is_of_one_shard() -> None:
    for name in map(str, range(50)):
        assert sum(Shard(i, 7).holds(name) for i in range(1, 8)) == 1


def test_max_bytes_ends_a_run_that_goes_on_when_repeated(
    cli_json, write_documents: Callable[[int], Path], read_store, store: Path
) -> None:
    folder = write_documents(30)
    total = cli_json("precache", folder, "--dry-run")["new_bytes"]
    first = cli_json("precache", folder, "--max-bytes", str(total // 3), exit_code=3)
    assert first["reached_max_bytes"] is True
    assert 0 < first["documents"] < 30
    assert total // 3 <= sum(map(len, read_store(store)[1].values())) < total
    second = cli_json("precache", folder)
    assert second["reached_max_bytes"] is False
    assert second["prefilled_chunks"] == 30 - first["prefilled_chunks"]


def test_prune_deletes_what_came_from_there_and_is_gone(
    cli_json, cli, tmp_path: Path, read_store, store: Path
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / f"{folder.name}-a.txt").write_text(f"{folder.name} text a")
        (folder / f"{folder.name}-b.txt").write_text(f"{folder.name} text b")
    rows = one / "rows.csv"
    rows.write_text("id,text\nR1,first row\nR2,second row\n")
    cli_json("precache", one)
    cli_json("precache", other)
    (one / "one-a.txt").unlink()
    (other / "other-a.txt").unlink()
    rows.write_text("id,text\nR2,second row\n")

    assert cli_json("precache", one)["pruned"] == 0
    assert len(documents_of(read_store, store)) == 6
    assert cli_json("precache", one, "--prune")["pruned"] == 2
    documents, entries = read_store(store)
    assert documents.keys() == {"one-b.txt", "R2", "other-a.txt", "other-b.txt"}
    assert set(entries) == {c.token_ids for d in documents.values() for c in d.chunks}
    result = cli("precache", one, "--prune", "--dry-run")
    assert result.exit_code == 2


def test_prune_keeps_what_cannot_be_read_now(
    cli_json, tmp_path: Path, read_store, store: Path
) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.txt").write_text("a text")
    (folder / "rows.jsonl").write_text('{"id": "R1", "text": "one"}\n{"id": "R2", "text": "two"}')
    cli_json("precache", folder)
    (folder / "a.txt").write_bytes(b"\xff\xff\xff")
    (folder / "rows.jsonl").write_text('{"id": "R1", "text": "one"}\n{"id": "R2", "te')
    assert cli_json("precache", folder, "--prune", exit_code=3)["pruned"] == 0
    assert documents_of(read_store, store).keys() == {"a.txt", "R1", "R2"}
    missing = tmp_path / "nowhere"
    assert cli_json("precache", missing, "--prune", exit_code=1)["pruned"] == 0
    assert documents_of(read_store, store).keys() == {"a.txt", "R1", "R2"}


def test_prune_keeps_all_where_nothing_is_found(
    cli_json, cli, tmp_path: Path, read_store, store: Path
) -> None:
    """A folder that is not mounted looks like one that was emptied."""
    folder, other = tmp_path / "mounted", tmp_path / "other"
    (folder / "deep").mkdir(parents=True)
    other.mkdir()
    (folder / "a.txt").write_text("a text")
    (folder / "deep" / "b.txt").write_text("b text")
    (other / "c.txt").write_text("c text")
    (other / "d.txt").write_text("d text")
    cli_json("precache", folder, other)
    folder.rename(tmp_path / "elsewhere")
    folder.mkdir()
    (other / "c.txt").unlink()
    assert cli_json("precache", folder, other, "--prune")["pruned"] == 1
    assert documents_of(read_store, store).keys() == {"a.txt", "deep/b.txt", "d.txt"}


def test_a_row_with_broken_characters_is_reported(cli_json, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one", "note": "\\ud800"}\n{"text": "two"}\n')
    summary = cli_json("precache", path, exit_code=3)
    assert [f["item"] for f in summary["failures"]] == ["rows.jsonl#1"]
    assert summary["documents"] == 1


def test_each_shard_prunes_its_own(
    cli_json, write_documents: Callable[[int], Path], read_store, store: Path
) -> None:
    folder = write_documents(8)
    cli_json("precache", folder)
    for path in sorted(folder.iterdir())[:4]:
        path.unlink()
    counts = [
        cli_json("precache", folder, "--prune", "--shard", f"{i}/2")["pruned"] for i in (1, 2)
    ]
    assert sum(counts) == 4
    assert documents_of(read_store, store).keys() == {f"{i:03}.txt" for i in range(4, 8)}
