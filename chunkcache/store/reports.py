"""Measurements that a store keeps beside its documents, each under a name for what it depends on.

A report that is damaged or cannot be read counts as none: it is measured again. Knows no report's fields.
"""

from typing import TypeVar

import msgspec
import xxhash

from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.records import CHECKSUM_BYTES
from chunkcache.store.transaction import Database

ReportT = TypeVar("ReportT", bound=msgspec.Struct)


def load_report(
    env: StoreEnvironment, kind: str, fingerprint: str, form: type[ReportT]
) -> ReportT | None:
    """The report of one kind under a fingerprint, if there is a readable one.

    Raises:
        StoreError: The store cannot be read.
    """
    with env.read() as txn:
        stored = txn.get(Database.MANIFEST, _name(kind, fingerprint))
        return None if stored is None else _sound_report(stored, form)


def load_reports(env: StoreEnvironment, kind: str, form: type[ReportT]) -> list[ReportT]:
    """All readable reports of one kind.

    Raises:
        StoreError: The store cannot be read.
    """
    with env.read() as txn:
        found = txn.scan(Database.MANIFEST, _name(kind, ""))
        reports = [_sound_report(data, form) for _, data in found]
    return [report for report in reports if report is not None]


def decode_report(stored: bytes | memoryview, form: type[ReportT]) -> ReportT | None:
    """A report; None for one that cannot be read, or that has other fields."""
    try:
        return msgspec.msgpack.decode(stored, type=form)
    except msgspec.DecodeError:
        return None


def keep_report(env: StoreEnvironment, kind: str, fingerprint: str, report: msgspec.Struct) -> None:
    """Keep a report in place of an older one of the same fingerprint.

    A store that was opened for reading alone keeps none: it is measured again next time.

    Raises:
        StoreFullError: There is no room for it.
        StoreError: The store cannot be written.
    """
    if env.read_only:
        return
    name, payload = _name(kind, fingerprint), msgspec.msgpack.encode(report)
    data = xxhash.xxh3_64_digest(payload) + payload
    env.update(lambda txn: txn.put(Database.MANIFEST, name, data))


def _sound_report(stored: memoryview, form: type[ReportT]) -> ReportT | None:
    checksum, payload = stored[:CHECKSUM_BYTES], stored[CHECKSUM_BYTES:]
    if bytes(checksum) != xxhash.xxh3_64_digest(payload):
        return None
    return decode_report(payload, form)


def _name(kind: str, fingerprint: str) -> bytes:
    return f"{kind}/{fingerprint}".encode()
