"""``chunkcache precache``: what is cached, what is reported, how it ends."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest


def texts(read_store, store: Path) -> dict[str, str]:
    return {name: document.text for name, document in read_store(store)[0].items()}


def test_a_folder_is_cached_once_and_costs_a_look_up_afterwards(
    cli_json, cli, write_documents: Callable[[int], Path], read_store, store: Path
) -> None:
    folder = write_documents(5)
    first = cli_json("precache", folder)
    assert (first["documents"], first["created"], first["prefilled_chunks"]) == (5, 5, 5)
    assert first["chunks"] == 5
    assert first["tokens"] == first["prefilled_tokens"] > 0
    assert first["tokens_per_second"] > 0
    assert first["failures"] == []
    assert first["interrupted"] is False
    documents, entries = read_store(store)
    assert set(entries) == {c.token_ids for d in documents.values() for c in d.chunks}

    second = cli_json("precache", folder)
    assert (second["unchanged"], second["prefilled_chunks"]) == (5, 0)

    (folder / "002.txt").write_text("Another text altogether.", encoding="utf-8")
    result = cli("precache", folder)
    assert result.exit_code == 0
    assert "5 (0 new, 1 changed, 4 unchanged), 0 failed" in result.stdout
    assert "1 chunks with" in result.stdout


def test_options_choose_store_and_model(
    cli_json, write_documents, model_dir, read_store, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    model = model_dir("qwen2", max_position_embeddings=4096)
    folder = write_documents(1)
    cli_json("precache", folder, "--store", other, "--model", model, "--codec", "raw")
    documents, entries = read_store(other)
    (chunk,) = documents["000.txt"].chunks
    # Two layers of two heads of 16 numbers, keys and values, four bytes each.
    assert len(entries[chunk.token_ids]) == len(chunk.token_ids) * 2 * 2 * 16 * 2 * 4


def test_control_bytes_have_one_rule(cli_json, tmp_path: Path, read_store, store: Path) -> None:
    """I01: NULs are dropped before anything is cut, other control characters are kept."""
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "nul.txt").write_bytes(b"abc\x00def")
    (folder / "only-nul.txt").write_bytes(b"\x00")
    (folder / "bell.txt").write_bytes(b"ring \x07 and \x1b[31mred")
    summary = cli_json("precache", folder, exit_code=3)
    assert [(f["item"], f["code"]) for f in summary["failures"]] == [
        ("only-nul.txt", "empty_document")
    ]
    assert texts(read_store, store) == {
        "nul.txt": "abcdef",
        "bell.txt": "ring \x07 and \x1b[31mred",
    }


def test_bad_files_do_not_stop_the_others(cli, cli_json, write_documents) -> None:
    """I03: 100 files, five of them bad: the others are cached, each bad one has its reason."""
    folder = write_documents(100)
    (folder / "050.txt").write_bytes(b"caf\xe9")
    (folder / "060.txt").chmod(0)
    (folder / "070.txt").unlink()
    (folder / "070.txt").mkdir()
    (folder / "080.txt").write_bytes(b"")
    (folder / "090.txt").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    expected = {
        "050.txt": "invalid_encoding",
        "060.txt": "unreadable",
        "070.txt": "not_a_file",
        "080.txt": "empty_document",
        "090.txt": "binary",
    }
    if os.access(folder / "060.txt", os.R_OK):
        del expected["060.txt"]  # whoever runs this may read everything
    summary = cli_json("precache", folder, exit_code=3)
    assert {f["item"]: f["code"] for f in summary["failures"]} == expected
    assert summary["documents"] == 100 - len(expected)

    result = cli("precache", folder)
    assert result.exit_code == 3
    for name, code in expected.items():
        assert f"failed: {name}: " in result.stderr
        assert f"({code})" in result.stderr


def test_encodings_are_read_or_reported(cli_json, tmp_path: Path, read_store, store: Path) -> None:
    """I04: what a byte-order mark says is believed; anything else is UTF-8 or reported."""
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "utf-8.txt").write_bytes(b"hello")
    (folder / "utf-8-bom.txt").write_bytes(b"\xef\xbb\xbfhello")
    (folder / "utf-16.txt").write_bytes(b"\xff\xfe" + "hello".encode("utf-16-le"))
    (folder / "cp1252.txt").write_bytes("T\u00fcr".encode("cp1252"))
    summary = cli_json("precache", folder, exit_code=3)
    assert [(f["item"], f["code"]) for f in summary["failures"]] == [
        ("cp1252.txt", "invalid_encoding")
    ]
    assert summary["prefilled_chunks"] == 1
    documents, entries = read_store(store)
    assert len({d.chunks[0].chunk_id for d in documents.values()}) == 1
    assert len(documents) == 3
    assert len(entries) == 1


def test_nothing_cached_is_a_failure_of_its_own(cli, cli_json, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "empty.txt").write_bytes(b"")
    summary = cli_json("precache", folder, tmp_path / "nowhere", exit_code=1)
    assert {f["code"] for f in summary["failures"]} == {"empty_document", "not_found"}
    (folder / "empty.txt").unlink()
    result = cli("precache", folder)
    assert result.exit_code == 0
    assert "no files to cache found" in result.stderr


def test_another_chunk_size_cuts_everything_again(
    cli_json, tmp_path: Path, read_store, store: Path
) -> None:
    """J03: a run that goes on under another size leaves no document cut as before."""
    folder = tmp_path / "docs"
    folder.mkdir()
    paths = []
    for i in range(6):
        paths.append(folder / f"{i}.txt")
        sentences = [f"Door {i} of house {j} opens at {j} with code {i}{j}." for j in range(12)]
        paths[-1].write_text(" ".join(sentences), encoding="utf-8")
    cli_json("precache", *paths[:3], "--chunk-tokens", "128")
    assert max(len(ids) for ids in read_store(store)[1]) > 32

    summary = cli_json("precache", folder, "--chunk-tokens", "32")
    assert (summary["created"], summary["updated"]) == (3, 3)
    documents, entries = read_store(store)
    assert len({d.chunking for d in documents.values()}) == 1
    chunks = {c.token_ids for d in documents.values() for c in d.chunks}
    assert set(entries) == chunks
    assert max(map(len, chunks)) <= 32


@pytest.mark.parametrize("setting", [("--preparation", "warm"), ("--chunk-tokens", "3")])
def test_a_bad_setting_is_an_error_before_the_model_is_loaded(
    cli, cli_json, write_documents, setting: tuple[str, str]
) -> None:
    folder = write_documents(1)
    body = cli_json("precache", folder, *setting, exit_code=1)
    assert body["error"]["code"] == "invalid_value"
    result = cli("precache", folder, *setting)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.endswith("(invalid_value)\n")
    assert "loading" not in result.stderr


def test_a_model_that_is_not_there_is_an_error(cli_json, write_documents, tmp_path: Path) -> None:
    body = cli_json("precache", write_documents(1), "--model", tmp_path / "none", exit_code=1)
    assert body["error"]["code"] == "model_files"


def test_a_full_store_ends_the_run(cli_json, tmp_path: Path) -> None:
    text = "".join(f"Room {i} has {i * 7} chairs. " for i in range(1_800))
    (tmp_path / "large.txt").write_text(text, encoding="utf-8")
    args = ("--store-max-bytes", str(16 << 20), "--codec", "raw", "--preparation", "alone")
    body = cli_json("precache", tmp_path / "large.txt", *args, exit_code=1)
    assert body["error"]["code"] == "store_full"
