"""The bytes of a stored entry.

::

    [0, 8)            magic
    [8, 12)           header length H, little-endian
    [12, 12 + H)      header, msgpack
    [12 + H, 20 + H)  xxh3_64 of [0, 12 + H)
    ...               zeros up to a multiple of 64
    payload           K_0 V_0 K_1 V_1 ... each [T, Hkv, D], one checksum per layer

Layers lie one behind the other, so that layer l can be read while layer l-1 is in use. This module
knows nothing of where the bytes are kept.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from chunkcache.codecs import CODECS
from chunkcache.entry import Entry
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
        k_offset: First byte of K, from the start of the payload.
        v_offset: First byte of V.
        num_bytes: Bytes of K, and as many of V.
        checksum: xxh3_64 of K then V.
    """

    k_offset: int
    v_offset: int
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


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layer_checksum(k: np.ndarray, v: np.ndarray) -> int:
    hasher = xxhash.xxh3_64(k.data)
    hasher.update(v.data)
    return hasher.intdigest()


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a contiguous [L, T, Hkv, D] tensor as uint8 [L, layer bytes]."""
    return tensor.view(torch.uint8).reshape(tensor.shape[0], -1).numpy()


def encode_entry(entry: Entry) -> memoryview:
    """Serialise an entry.

    Args:
        entry: Any strides; on the host.

    Returns:
        A buffer of its own.

    Raises:
        InvalidValueError: The tensors' dtype is not that of the codec.
    """
    codec = CODECS.get(entry.identity.codec)
    if codec is None or codec.dtype != entry.k.dtype:
        raise InvalidValueError(
            f"an entry of codec {entry.identity.codec!r} holds {entry.k.dtype}", param="codec"
        )
    k, v = _bytes_of(entry.k.contiguous()), _bytes_of(entry.v.contiguous())
    num_layers, layer_bytes = k.shape
    shape, identity = entry.shape, entry.identity
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
            shape=(shape.num_layers, shape.num_tokens, shape.num_kv_heads, shape.head_dim),
            dtype=_dtype_name(entry.k.dtype),
            layers=[
                LayerRecord(
                    k_offset=2 * layer * layer_bytes,
                    v_offset=(2 * layer + 1) * layer_bytes,
                    num_bytes=layer_bytes,
                    checksum=_layer_checksum(k[layer], v[layer]),
                )
                for layer in range(num_layers)
            ],
            payload_bytes=k.nbytes + v.nbytes,
        )
    )
    start = _payload_start(len(header))
    buffer = np.empty(start + k.nbytes + v.nbytes, dtype=np.uint8)
    front = MAGIC + len(header).to_bytes(4, "little") + header
    front += xxhash.xxh3_64_digest(front)
    buffer[:start] = np.frombuffer(front.ljust(start, b"\0"), dtype=np.uint8)
    payload = buffer[start:].reshape(num_layers, 2, layer_bytes)
    payload[:, 0] = k
    payload[:, 1] = v
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
        An entry that aliases nothing; K and V are one contiguous, writable allocation each.

    Raises:
        DamagedEntryError: The bytes are damaged, or are another entry's. No other exception.
    """
    header = decode_header(buffer)
    check_identity(header, expected)
    payload = _check_payload(buffer, header)
    if header.shape[1] != len(expected.token_ids):
        raise DamagedEntryError(MissReason.SHAPE)
    k = torch.empty(header.shape, dtype=CODECS[header.codec].dtype)
    v = torch.empty(header.shape, dtype=CODECS[header.codec].dtype)
    k_bytes, v_bytes = _bytes_of(k), _bytes_of(v)
    for layer, record in enumerate(header.layers):
        # The checksum pass warms the cache for the copy.
        if xxhash.xxh3_64_intdigest(payload[layer].data) != record.checksum:
            raise DamagedEntryError(MissReason.CHECKSUM)
        k_bytes[layer] = payload[layer, 0]
        v_bytes[layer] = payload[layer, 1]
    return Entry(identity=expected, key=expected.key(), k=k, v=v)


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
    payload = _check_payload(buffer, header)
    if header.shape[1] != len(identity.token_ids):
        raise DamagedEntryError(MissReason.SHAPE)
    for layer, record in enumerate(header.layers):
        if xxhash.xxh3_64_intdigest(payload[layer].data) != record.checksum:
            raise DamagedEntryError(MissReason.CHECKSUM)


def _check_payload(buffer: bytes | memoryview, header: EntryHeader) -> np.ndarray:
    """The payload as uint8 [L, 2, layer bytes], once geometry, layout and length agree."""
    codec = CODECS.get(header.codec)
    if codec is None or _dtype_name(codec.dtype) != header.dtype or min(header.shape) < 1:
        raise DamagedEntryError(MissReason.SHAPE)
    num_layers, num_tokens, num_kv_heads, head_dim = header.shape
    layer_bytes = num_tokens * num_kv_heads * head_dim * codec.dtype.itemsize
    if header.payload_bytes != 2 * num_layers * layer_bytes or len(header.layers) != num_layers:
        raise DamagedEntryError(MissReason.SHAPE)
    for layer, record in enumerate(header.layers):
        place = (record.k_offset, record.v_offset, record.num_bytes)
        if place != (2 * layer * layer_bytes, (2 * layer + 1) * layer_bytes, layer_bytes):
            raise DamagedEntryError(MissReason.SHAPE)
    view = memoryview(buffer)
    header_bytes = int.from_bytes(view[len(MAGIC) : PREFIX_BYTES], "little")
    start = _payload_start(header_bytes)
    if len(view) != start + header.payload_bytes:
        raise DamagedEntryError(MissReason.TRUNCATED)
    return np.frombuffer(view, dtype=np.uint8, offset=start).reshape(num_layers, 2, layer_bytes)
