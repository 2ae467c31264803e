"""A bulk job's pages leave the page cache: which ones, and that they can still be read."""

import os
from pathlib import Path

import pytest

from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.page_cache import WrittenPages
from chunkcache.store.transaction import Database

pytestmark = pytest.mark.skipif(
    not hasattr(os, "posix_fadvise"), reason="this system cannot drop cached pages"
)


def test_each_call_drops_what_was_added_since_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Nothing written, nothing dropped. 2. Ranges are adjacent, as long as what was written
    and end with the file's last page. 3. What was written is read back whole."""
    ranges: list[tuple[int, int]] = []
    advise = os.posix_fadvise

    def watched(file: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        ranges.append((start, start + length))
        advise(file, start, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", watched)
    values = {bytes([i]) * 8: os.urandom(300_000) for i in range(3)}
    with StoreEnvironment.open(tmp_path / "store", max_bytes=1 << 26) as env:
        written = WrittenPages(env)
        written.drop()
        assert not ranges
        first = env.used_file_bytes
        for key, value in values.items():
            env.update(lambda txn, k=key, v=value: txn.put(Database.ENTRIES, k, v))
            written.drop()
        written.drop()
        assert ranges[0][0] == first
        assert [end for _, end in ranges[:-1]] == [start for start, _ in ranges[1:]]
        assert all(end - start >= 300_000 for start, end in ranges)
        assert ranges[-1][1] == env.used_file_bytes
        with env.read() as txn:
            assert {k: bytes(txn.get(Database.ENTRIES, k) or b"") for k in values} == values


def test_a_filesystem_that_takes_no_advice_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def refuse(file: int, start: int, length: int, advice: int) -> None:
        asked.append(length)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    with StoreEnvironment.open(tmp_path / "store", max_bytes=1 << 26) as env:
        written = WrittenPages(env)
        env.update(lambda txn: txn.put(Database.ENTRIES, b"key", b"v" * 300_000))
        written.drop()
        written.drop()
        with env.read() as txn:
            assert bytes(txn.get(Database.ENTRIES, b"key") or b"") == b"v" * 300_000
    assert len(asked) == 1, "what was refused once is not asked for again"
