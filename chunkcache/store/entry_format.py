"""The bytes of a stored entry.

::

    [0, 8)            magic
    [8, 12)           header length H, little-endian
    [12, 12 + H)      header, msgpack
    [12 + H, 20 + H)  xxh3_64 of [0, 12 + H)
    ...               zeros up to a multiple of 64
    payload           layer 0, layer 1, ... (see ``payload_layout``), one checksum per layer

Layers lie one behind the other, so that layer l can be read while layer l-1 is in use. This module
knows nothing of where the bytes are kept.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
import numpy as np
import xxhash

from chunkcache.codecs import CODECS, Codec
from chunkcache.entry import Entry, EntryShape
from chunkcache.errors import InvalidValueError
from chunkcache.identity import (
    ENTRY_FORMAT_VERSION,
    ChunkKey,
    EntryIdentity,
    ModelDigest,
    TenantNamespace,
    decode_token_ids,
    encode_token_ids,
)
from chunkcache.store.payload_layout import PayloadLayout
from chunkcache.store.tier import MissReason

MAGIC = b"CHNKKV\r\n"
"""The line end shows a copy that went through text mode."""
PREFIX_BYTES = len(MAGIC) + 4
CHECKSUM_BYTES = 8
PAYLOAD_ALIGNMENT_BYTES = 64


try:
    PRODUCER = version("chunkcache")
except PackageNotFoundError:
    PRODUCER = "source"


class DamagedEntryError(Exception):
    """Stored bytes are not the entry that was asked for; never leaves the store.

    Attributes:
        reason: What is wrong.
    """

    def __init__(self, reason: MissReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class LayerRecord(msgspec.Struct, array_like=True, frozen=True):
    """Where one layer lies in the payload.

    Attributes:
        offset: Its first byte, from the start of the payload.
        num_bytes: Its length: keys, values, scales and what lies between them.
        checksum: xxh3_64 of all of it.
    """

    offset: int
    num_bytes: int
    checksum: int


class EntryHeader(msgspec.Struct, frozen=True):
    """Everything about a stored entry but its numbers."""

    format: int
    producer: str
    model: bytes
    namespace: bytes
    preparation: str
    prefix_ids: bytes
    codec: str
    token_ids: bytes
    shape: tuple[int, int, int, int]
    dtype: str
    group_tokens: int | None
    layers: list[LayerRecord]
    payload_bytes: int

    def identity(self) -> EntryIdentity:
        """The identity that the entry was stored under.

        Raises:
            InvalidValueError: The token ids are not well formed.
        """
        return EntryIdentity(
            model=ModelDigest(self.model),
            namespace=TenantNamespace(self.namespace),
            preparation=self.preparation,
            prefix_ids=decode_token_ids(self.prefix_ids),
            codec=self.codec,
            token_ids=decode_token_ids(self.token_ids),
        )


class _VersionOnly(msgspec.Struct):
    format: Any = None


_VERSION_DECODER = msgspec.msgpack.Decoder(_VersionOnly)
_HEADER_DECODER = msgspec.msgpack.Decoder(EntryHeader)


def _payload_start(header_bytes: int) -> int:
    end = PREFIX_BYTES + header_bytes + CHECKSUM_BYTES
    return -(-end // PAYLOAD_ALIGNMENT_BYTES) * PAYLOAD_ALIGNMENT_BYTES


def _dtype_name(codec: Codec) -> str:
    return str(codec.dtype).removeprefix("torch.")


def encode_entry(entry: Entry) -> memoryview:
    """Serialise an entry.

    Args:
        entry: Any strides; on the host.

    Returns:
        A buffer of its own.

    Raises:
        InvalidValueError: The tensors' dtype is not that of the codec.
    """
    identity, scales = entry.identity, entry.scales
    codec = CODECS.get(identity.codec)
    group_tokens = None if scales is None else scales.group_tokens
    if codec is None or (codec.dtype, codec.group_tokens) != (entry.k.dtype, group_tokens):
        raise InvalidValueError(
            f"an entry of codec {identity.codec!r} holds {entry.k.dtype}", param="codec"
        )
    layout = PayloadLayout.of(codec, entry.shape)
    payload = np.zeros((layout.num_layers, layout.layer_bytes), dtype=np.uint8)
    layout.write(entry, payload)
    header = msgspec.msgpack.encode(
        EntryHeader(
            format=ENTRY_FORMAT_VERSION,
            producer=PRODUCER,
            model=identity.model,
            namespace=identity.namespace,
            preparation=identity.preparation,
            prefix_ids=encode_token_ids(identity.prefix_ids),
            codec=identity.codec,
            token_ids=encode_token_ids(identity.token_ids),
            shape=entry.shape.axes,
            dtype=_dtype_name(codec),
            group_tokens=group_tokens,
            layers=[
                LayerRecord(
                    offset=index * layout.layer_bytes,
                    num_bytes=layout.layer_bytes,
                    checksum=xxhash.xxh3_64_intdigest(layer.data),
                )
                for index, layer in enumerate(payload)
            ],
            payload_bytes=payload.nbytes,
        )
    )
    start = _payload_start(len(header))
    buffer = np.empty(start + payload.nbytes, dtype=np.uint8)
    front = MAGIC + len(header).to_bytes(4, "little") + header
    front += xxhash.xxh3_64_digest(front)
    buffer[:start] = np.frombuffer(front.ljust(start, b"\0"), dtype=np.uint8)
    buffer[start:] = payload.reshape(-1)
    return buffer.data


def decode_header(buffer: bytes | memoryview) -> EntryHeader:
    """Read and check the header alone.

    Raises:
        DamagedEntryError: It is not the sound header of an entry of this format.
    """
    view = memoryview(buffer)
    if len(view) < PREFIX_BYTES:
        raise DamagedEntryError(MissReason.TRUNCATED)
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise DamagedEntryError(MissReason.CORRUPT_HEADER)
    header_bytes = int.from_bytes(view[len(MAGIC) : PREFIX_BYTES], "little")
    header_end = PREFIX_BYTES + header_bytes
    if header_end + CHECKSUM_BYTES > len(view):
        raise DamagedEntryError(MissReason.TRUNCATED)
    stored = bytes(view[header_end : header_end + CHECKSUM_BYTES])
    if stored != xxhash.xxh3_64_digest(view[:header_end]):
        raise DamagedEntryError(MissReason.CORRUPT_HEADER)
    try:
        found = _VERSION_DECODER.decode(view[PREFIX_BYTES:header_end]).format
        if isinstance(found, bool) or found != ENTRY_FORMAT_VERSION:
            raise DamagedEntryError(MissReason.FORMAT_VERSION)
        return _HEADER_DECODER.decode(view[PREFIX_BYTES:header_end])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedEntryError(MissReason.CORRUPT_HEADER) from error


def check_identity(header: EntryHeader, expected: EntryIdentity) -> None:
    """Compare every identity field with what was asked for.

    Raises:
        DamagedEntryError: One differs; the reason says which.
    """
    prefix_ids = encode_token_ids(expected.prefix_ids)
    checks = [
        (header.model == expected.model, MissReason.FOREIGN_MODEL),
        (header.namespace == expected.namespace, MissReason.FOREIGN_NAMESPACE),
        (header.preparation == expected.preparation, MissReason.PREPARATION_MISMATCH),
        (header.prefix_ids == prefix_ids, MissReason.PREPARATION_MISMATCH),
        (header.codec == expected.codec, MissReason.CODEC_MISMATCH),
        (header.token_ids == encode_token_ids(expected.token_ids), MissReason.TOKEN_IDS_MISMATCH),
    ]
    for agrees, reason in checks:
        if not agrees:
            raise DamagedEntryError(reason)


def decode_entry(buffer: bytes | memoryview, expected: EntryIdentity) -> Entry:
    """Read an entry into fresh memory.

    Args:
        buffer: Stored bytes, at any alignment, writable or not.
        expected: The identity that was asked for.

    Returns:
        An entry that aliases nothing; each of its tensors is one contiguous, writable allocation.

    Raises:
        DamagedEntryError: The bytes are damaged, or are another entry's. No other exception.
    """
    header, layout, payload = _open(buffer, expected)
    tensors = layout.allocate()
    copiers = layout.copiers(tensors)
    for index, (layer, record) in enumerate(zip(payload, header.layers, strict=True)):
        # The checksum pass warms the cache for the copy.
        _check_layer(layer, record)
        for part, target in copiers:
            target[index] = layer[part.start : part.end]
    return layout.entry(expected, tensors)


def view_entry(buffer: memoryview, expected: EntryIdentity) -> Entry:
    """Check an entry and give it where it lies, as far as its alignment allows.

    Args:
        buffer: Stored bytes; the caller keeps them as they are for as long as the entry is used.
        expected: The identity that was asked for.

    Returns:
        An entry whose tensors nobody may write to: their memory may be read-only.

    Raises:
        DamagedEntryError: As of :func:`decode_entry`.
    """
    header, layout, payload = _open(buffer, expected)
    tensors = layout.views(payload)
    if tensors is None:
        return decode_entry(buffer, expected)
    for layer, record in zip(payload, header.layers, strict=True):
        _check_layer(layer, record)
    return layout.entry(expected, tensors)


def check_entry(buffer: bytes | memoryview, key: ChunkKey) -> None:
    """Check an entry as :func:`decode_entry` does, without copying it.

    Args:
        buffer: Stored bytes.
        key: The key it is stored under, which must be that of the identity it carries.

    Raises:
        DamagedEntryError: It is damaged, or filed under the wrong key.
    """
    header = decode_header(buffer)
    try:
        identity = header.identity()
    except InvalidValueError as error:
        raise DamagedEntryError(MissReason.CORRUPT_HEADER) from error
    if identity.key() != key:
        raise DamagedEntryError(MissReason.TOKEN_IDS_MISMATCH)
    _, payload = _check_payload(buffer, header, len(identity.token_ids))
    for layer, record in zip(payload, header.layers, strict=True):
        _check_layer(layer, record)


def _open(
    buffer: bytes | memoryview, expected: EntryIdentity
) -> tuple[EntryHeader, PayloadLayout, np.ndarray]:
    """Check everything but the numbers."""
    header = decode_header(buffer)
    check_identity(header, expected)
    return header, *_check_payload(buffer, header, len(expected.token_ids))


def _check_layer(layer: np.ndarray, record: LayerRecord) -> None:
    if xxhash.xxh3_64_intdigest(layer.data) != record.checksum:
        raise DamagedEntryError(MissReason.CHECKSUM)


def _check_payload(
    buffer: bytes | memoryview, header: EntryHeader, num_tokens: int
) -> tuple[PayloadLayout, np.ndarray]:
    """The payload as uint8 [L, layer bytes], once geometry, layout and length agree."""
    codec = CODECS.get(header.codec)
    if codec is None or min(header.shape) < 1 or header.shape[1] != num_tokens:
        raise DamagedEntryError(MissReason.SHAPE)
    if (header.dtype, header.group_tokens) != (_dtype_name(codec), codec.group_tokens):
        raise DamagedEntryError(MissReason.SHAPE)
    layout = PayloadLayout.of(codec, EntryShape(*header.shape))
    if header.payload_bytes != layout.num_bytes or len(header.layers) != layout.num_layers:
        raise DamagedEntryError(MissReason.SHAPE)
    for index, record in enumerate(header.layers):
        if (record.offset, record.num_bytes) != (index * layout.layer_bytes, layout.layer_bytes):
            raise DamagedEntryError(MissReason.SHAPE)
    view = memoryview(buffer)
    header_bytes = int.from_bytes(view[len(MAGIC) : PREFIX_BYTES], "little")
    start = _payload_start(header_bytes)
    if len(view) != start + header.payload_bytes:
        raise DamagedEntryError(MissReason.TRUNCATED)
    payload = np.frombuffer(view, dtype=np.uint8, offset=start)
    return layout, payload.reshape(layout.num_layers, layout.layer_bytes)
