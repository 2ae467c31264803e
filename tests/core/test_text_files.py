"""Which files are read, how they are named and decoded, and what is said about the others."""

import os
import sys
from pathlib import Path

import pytest

from chunkcache.results import ItemFailure
from chunkcache.text_files import TextFile, TextItem, find_text_files


def _found(*paths: Path) -> dict[str, str]:
    """Id to text, or to the failure's code."""
    found = {}
    for item in find_text_files(paths):
        assert not isinstance(item, TextItem)
        result = item if isinstance(item, ItemFailure) else item.read()
        name = item.item if isinstance(item, ItemFailure) else item.document_id
        found[name] = result.code if isinstance(result, ItemFailure) else result.text
    return found


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_marked_encodings_are_read(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes("h\u00e4llo".encode(encoding))
    assert _found(tmp_path)["a.txt"].removeprefix("\ufeff") == "h\u00e4llo"


def test_other_encodings_are_reported_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "cp1252.txt").write_bytes("h\u00e4llo".encode("cp1252"))
    (tmp_path / "image.txt").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00")
    assert set(_found(tmp_path).values()) == {"invalid_encoding"}


def test_folders_are_walked_in_order_and_suffixes_choose(tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    for name in ("z.md", "b/a.rst", "b/c/x.TXT", "b/skip.py"):
        (tmp_path / name).write_text("text")
    items = [i for i in find_text_files([tmp_path]) if isinstance(i, TextFile)]
    assert [i.document_id for i in items] == ["b/a.rst", "b/c/x.TXT", "z.md"]
    assert [i.kind.text_format for i in items] == ["text", "text", "markdown"]


def test_a_file_named_outright_is_read_whatever_its_suffix(tmp_path: Path) -> None:
    (tmp_path / "notes.log").write_text("text")
    assert _found(tmp_path / "notes.log") == {"notes.log": "text"}


def test_links_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "link.txt").symlink_to(secret)
    (corpus / "loop").symlink_to(corpus)
    assert _found(corpus) == {"link.txt": "symlink"}


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes in a folder")
def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "folder.md").mkdir()
    assert set(_found(tmp_path).values()) == {"not_a_file"}
    assert _found(tmp_path / "pipe.txt") == {str(tmp_path / "pipe.txt"): "not_a_file"}
    assert _found(tmp_path / "nowhere") == {str(tmp_path / "nowhere"): "not_found"}


def test_one_id_twice_is_reported(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(folder)
    found = list(find_text_files([tmp_path / "one", tmp_path / "two"]))
    assert [i.code for i in found if isinstance(i, ItemFailure)] == ["duplicate_id"]


def test_a_file_that_vanishes_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (item,) = find_text_files([tmp_path])
    (tmp_path / "a.txt").unlink()
    assert isinstance(item, TextFile)
    result = item.read()
    assert isinstance(result, ItemFailure)
    assert result.code == "unreadable"


def test_a_folder_that_may_be_listed_and_not_entered_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed" / "deep").mkdir(parents=True)
    (tmp_path / "closed" / "deep" / "a.txt").write_text("text")
    (tmp_path / "open.txt").write_text("text")
    stat = Path.stat

    def guarded(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if tmp_path / "closed" in path.parents:
            raise PermissionError(13, "Permission denied")
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", guarded)
    assert _found(tmp_path) == {"closed": "unreadable", "open.txt": "text"}
    outright = tmp_path / "closed" / "deep"
    assert _found(outright) == {str(outright): "unreadable"}
