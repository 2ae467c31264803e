"""``chunkcache precache --watch``: what changes is cached as it changes, and nothing else is read."""

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chunkcache.errors import StoreError
from chunkcache.results import ItemFailure, PrecacheSummary
from chunkcache.text_files import TextFile, find_text_files, source_root
from chunkcache_api.cli.corpus import Corpus, Shard
from chunkcache_api.cli.precache_meter import SizedItem
from chunkcache_api.cli.precache_watch import Changes, joined, without_recovered

SUMMARY = PrecacheSummary(1, 1, 0, 0, 2, 40, 2, 40, 80, 2.0, 0, 2.0, 20.0)
SECONDS = 60.0


def corpus_of(folder: Path, *failed: str) -> Corpus:
    items = [i for i in find_text_files([folder]) if isinstance(i, TextFile)]
    failures = [ItemFailure(name, "binary", "") for name in failed]
    sized = tuple(SizedItem(i, 1) for i in (*items, *failures))
    names = frozenset(i.document_id for i in items)
    return Corpus(sized, Shard(), names, failed, frozenset({source_root(folder)}))


def names_of(corpus: Corpus) -> list[str]:
    return [
        s.item.item if isinstance(s.item, ItemFailure) else s.item.document_id for s in corpus.items
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.txt", "sub/b.txt", "sub/deep/c.txt", "subway.txt"):
        path = tmp_path / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "docs"


@pytest.mark.parametrize(
    ("changed", "touched"),
    [
        (["a.txt"], ["a.txt"]),
        (["sub"], ["sub/b.txt", "sub/deep/c.txt"]),
        (["sub/deep/c.txt", "gone.txt"], ["sub/deep/c.txt"]),
        (["rows.csv"], ["rows.csv#3"]),
        ([], []),
    ],
)
def test_a_change_concerns_its_file_or_folder(
    folder: Path, changed: list[str], touched: list[str]
) -> None:
    corpus = corpus_of(folder, "rows.csv#3")
    names = frozenset((source_root(folder), name) for name in changed)
    found = Changes(names).touched(corpus)
    assert sorted(names_of(found)) == sorted(touched)
    assert found.document_ids == corpus.document_ids
    elsewhere = frozenset(("another root", name) for name, _ in zip(changed, changed, strict=True))
    assert [n for n in names_of(Changes(elsewhere).touched(corpus)) if "#" not in n] == []
    assert Changes(names, is_known=False).touched(corpus) == corpus


def test_summaries_add_up(folder: Path) -> None:
    bad = ItemFailure("a.txt", "binary", "")
    gone = ItemFailure("gone.txt", "binary", "")
    first = replace(SUMMARY, failures=(bad, gone), prefilled_tokens=10, seconds=1.0)
    second = replace(SUMMARY, failures=(), prefilled_tokens=30, seconds=1.0)
    total = joined(first, second)
    assert (total.documents, total.prefilled_tokens, total.tokens_per_second) == (2, 40, 20.0)
    assert total.prefill_rows_per_token == total.prefill_rows / 40
    corpus = corpus_of(folder)
    untouched = replace(corpus, items=())
    assert without_recovered(total.failures, untouched, second) == (bad,)
    assert without_recovered(total.failures, corpus, second) == ()
    assert without_recovered(total.failures, corpus, first) == (bad, gone)


@pytest.mark.parametrize("option", [("--dry-run",), ("--max-bytes", "9")])
def test_what_does_not_go_together(cli, folder: Path, option: tuple[str, ...]) -> None:
    assert cli("precache", folder, "--watch", *option).exit_code == 2


def test_a_file_cannot_be_watched(cli_json, folder: Path) -> None:
    pytest.importorskip("watchfiles")
    told = cli_json("precache", folder / "a.txt", "--watch", exit_code=1)
    assert told["error"]["code"] == "invalid_value"


def test_a_missing_package_is_named(cli_json, folder: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    told = cli_json("precache", folder, "--watch", exit_code=1)
    assert told["error"]["code"] == "missing_extra"
    assert "chunkcache[watch]" in told["error"]["message"]


def wait_until_stored(
    process: "subprocess.Popen[str]", read_store: Any, store: Path, wanted: dict[str, str]
) -> None:
    """Return once the store's documents are these, by id and text."""
    ends_at = time.monotonic() + SECONDS
    found: dict[str, str] = {}
    while process.poll() is None and time.monotonic() < ends_at:
        with suppress(StoreError):  # not made yet, or in the middle of a write
            found = {name: d.text for name, d in read_store(store)[0].items()}
        if found == wanted:
            return
        time.sleep(0.05)
    process.kill()
    pytest.fail(f"the store holds {found}: {process.communicate()}")


def test_changes_are_followed_until_a_signal(
    start_cli, read_store, folder: Path, store: Path, cli_json
) -> None:
    pytest.importorskip("watchfiles")
    process = start_cli("precache", folder, "--watch", "--prune", "--json")
    texts = {name: name for name in ("a.txt", "sub/b.txt", "sub/deep/c.txt", "subway.txt")}
    wait_until_stored(process, read_store, store, texts)
    (folder / "new.txt").write_text("A new file.")
    (folder / "ignored.bin").write_text("Not a text.")
    wait_until_stored(process, read_store, store, texts | {"new.txt": "A new file."})
    (folder / "new.txt").write_text("Another text.")
    moved = folder.parent / "moved"
    (folder / "sub").rename(moved)
    texts = {"a.txt": "a.txt", "subway.txt": "subway.txt", "new.txt": "Another text."}
    wait_until_stored(process, read_store, store, texts)
    moved.rename(folder / "back")
    texts |= {"back/b.txt": "sub/b.txt", "back/deep/c.txt": "sub/deep/c.txt"}
    wait_until_stored(process, read_store, store, texts)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    summary = json.loads(stdout)
    assert summary["created"] >= 7
    assert (summary["interrupted"], summary["failures"]) == (False, [])
    assert summary["pruned"] == 2
    again = cli_json("precache", folder)
    assert (again["unchanged"], again["prefilled_chunks"]) == (5, 0)


def test_a_store_inside_the_folder_is_not_watched(
    start_cli, read_store, folder: Path, settings_env: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("watchfiles")
    inside = folder / "the.store"
    settings_env.setenv("CHUNKCACHE_STORE", str(inside))
    process = start_cli("precache", folder, "--watch")
    texts = {name: name for name in ("a.txt", "sub/b.txt", "sub/deep/c.txt", "subway.txt")}
    wait_until_stored(process, read_store, inside, texts)
    (folder / "a.txt").write_text("Another text.")
    wait_until_stored(process, read_store, inside, texts | {"a.txt": "Another text."})
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert stderr.count("changed") == 1, stderr


def test_a_killed_watch_loses_nothing(
    start_cli, cli_json, read_store, folder: Path, store: Path, tmp_path: Path
) -> None:
    pytest.importorskip("watchfiles")
    process = start_cli("precache", folder, "--watch")
    texts = {name: name for name in ("a.txt", "sub/b.txt", "sub/deep/c.txt", "subway.txt")}
    wait_until_stored(process, read_store, store, texts)
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"Door {number} opens at {number * 7 % 24}. " * 3)
    while len(read_store(store)[0]) < 10 and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    num_kept = len(read_store(store)[1])
    summary = cli_json("precache", folder)
    assert summary["documents"] == 64
    assert summary["prefilled_chunks"] == 64 - num_kept
    whole = tmp_path / "whole"
    cli_json("precache", folder, "--store", whole)
    assert read_store(store)[1] == read_store(whole)[1]
