"""Reports beside the documents: kept, replaced, and measured again where they cannot be read."""

from pathlib import Path

import msgspec

from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.reports import keep_report, load_report, load_reports
from chunkcache.store.transaction import Database


class Report(msgspec.Struct, frozen=True):
    figure: float


def test_a_report_is_kept_and_replaced(tmp_path: Path) -> None:
    with StoreEnvironment.open(tmp_path, max_bytes=16 << 20) as env:
        assert load_report(env, "speed", "a", Report) is None
        keep_report(env, "speed", "a", Report(1.5))
        keep_report(env, "speed", "a", Report(2.5))
    with StoreEnvironment.open(tmp_path, max_bytes=16 << 20) as env:
        assert load_report(env, "speed", "a", Report) == Report(2.5)
        assert load_report(env, "speed", "b", Report) is None
        assert load_report(env, "height", "a", Report) is None


def test_a_report_with_a_flipped_bit_counts_as_none(tmp_path: Path) -> None:
    with StoreEnvironment.open(tmp_path, max_bytes=16 << 20) as env:
        keep_report(env, "speed", "a", Report(1.5))
        with env.read() as txn:
            stored = bytes(txn.get(Database.MANIFEST, b"speed/a") or b"")
        spoiled = stored[:-1] + bytes([stored[-1] ^ 1])
        env.update(lambda txn: txn.put(Database.MANIFEST, b"speed/a", spoiled))
        assert load_report(env, "speed", "a", Report) is None
        assert load_reports(env, "speed", Report) == []


def test_a_report_of_another_form_counts_as_none(tmp_path: Path) -> None:
    with StoreEnvironment.open(tmp_path, max_bytes=16 << 20) as env:
        env.update(lambda txn: txn.put(Database.MANIFEST, b"speed/a", b"\xc1 no msgpack"))
        assert load_report(env, "speed", "a", Report) is None
        keep_report(env, "speed", "a", Report(1.0))
        assert load_report(env, "speed", "a", Report) == Report(1.0)
