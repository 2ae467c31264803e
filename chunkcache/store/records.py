"""The form of every small record in the store: a checksum, then msgpack with a format number.

LMDB keeps no checksums of its own, so a flipped bit in a record would otherwise be served.
"""

from typing import ClassVar, TypeVar

import msgspec
import xxhash

from chunkcache.errors import StoreFormatError

CHECKSUM_BYTES = 8


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records.

    Attributes:
        format: Format number; must equal the class's ``FORMAT``.
    """

    FORMAT: ClassVar[int] = 1

    format: int = 1


RecordT = TypeVar("RecordT", bound=Record)


class _FormatOnly(msgspec.Struct):
    format: object = None


_FORMAT_ONLY = msgspec.msgpack.Decoder(_FormatOnly)


def encode_record(record: Record) -> bytes:
    """Serialise a record."""
    payload = msgspec.msgpack.encode(record)
    return xxhash.xxh3_64_digest(payload) + payload


def decode_record(data: bytes | memoryview, kind: type[RecordT], what: str) -> RecordT:
    """Invert :func:`encode_record`; the result aliases nothing.

    Args:
        data: The stored bytes.
        kind: The record's class. A class with fewer fields reads those alone.
        what: What is being read, for the message.

    Raises:
        StoreFormatError: Damaged, or of another format.
    """
    view = memoryview(data)
    checksum, payload = view[:CHECKSUM_BYTES], view[CHECKSUM_BYTES:]
    if bytes(checksum) != xxhash.xxh3_64_digest(payload):
        raise StoreFormatError(f"{what} is damaged (checksum)")
    try:
        found = _FORMAT_ONLY.decode(payload).format
        if found != kind.FORMAT or isinstance(found, bool):
            raise StoreFormatError(f"{what} has format {found!r}, this build reads {kind.FORMAT}")
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreFormatError(f"{what} is damaged ({error})") from error


def decoded(data: bytes | memoryview, kind: type[RecordT]) -> RecordT | None:
    """A record, or None for one that is damaged or of another format."""
    try:
        return decode_record(data, kind, "a record")
    except StoreFormatError:
        return None
