"""What makes two entries the same entry: digests, keys, namespaces.

Every digest here is BLAKE3 (256 bit) over typed, length-framed fields, so that no two different
lists of fields give the same input bytes. This module knows nothing of stores or models; it turns
facts that others supply into bytes.
"""

import hmac
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import NewType, SupportsIndex

from blake3 import blake3

from chunkcache.errors import InvalidValueError

ChunkKey = NewType("ChunkKey", bytes)
"""32 bytes that name an entry: whose data, which model, which preparation, which tokens."""
ChunkId = NewType("ChunkId", bytes)
"""32 bytes that name a chunk's token ids under one tokenizer, for one tenant."""
ModelDigest = NewType("ModelDigest", bytes)
"""32 bytes over everything about a model that an entry depends on."""
TenantNamespace = NewType("TenantNamespace", bytes)
"""32 bytes: HMAC of a tenant's name under the store's secret."""
TokenizerDigest = NewType("TokenizerDigest", bytes)
"""32 bytes over the tokenizer's full serialised definition."""

ENTRY_FORMAT_VERSION = 2
"""Part of every entry key: raised when the meaning of stored bytes changes."""

DIGEST_BYTES = 32

Field = bytes | str | int | None


def digest_fields(domain: str, fields: Iterable[tuple[str, Field]]) -> bytes:
    """Digest named, typed fields.

    Each field contributes its name, a type tag and its length before its bytes, so that neither
    moving a boundary nor changing a type can leave the digest unchanged.

    Args:
        domain: What is being digested; two domains never share a digest.
        fields: ``(name, value)`` pairs, in a fixed order that the caller owns.

    Returns:
        32 bytes.

    Raises:
        TypeError: A value is of another type (``bool`` included: it would pass for an int).
    """
    hasher = blake3()

    def frame(tag: bytes, payload: bytes) -> None:
        hasher.update(tag + len(payload).to_bytes(8, "little"))
        hasher.update(payload)

    frame(b"D", domain.encode())
    for name, value in fields:
        frame(b"N", name.encode())
        if value is None:
            frame(b"0", b"")
        elif isinstance(value, bytes):
            frame(b"B", value)
        elif isinstance(value, str):
            frame(b"S", value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, int) and not isinstance(value, bool):
            frame(b"I", str(value).encode())
        else:
            raise TypeError(f"field {name!r} of {domain!r} is a {type(value).__name__}")
    return hasher.digest()


def encode_token_ids(token_ids: Sequence[SupportsIndex]) -> bytes:
    """Token ids as little-endian uint32, whatever container they come in.

    Args:
        token_ids: Ids as ints, numpy or torch integers. Booleans are not ids.

    Returns:
        4 bytes per id.

    Raises:
        InvalidValueError: An id is a boolean, not an integer, negative, or 2**32 or more.
    """
    if set(map(type, token_ids)) == {int}:
        # A key is made at every lookup: one call for all ids takes a tenth of one for each.
        with suppress(struct.error):
            return struct.pack(f"<{len(token_ids)}I", *token_ids)
    out = bytearray()
    for token_id in token_ids:
        if isinstance(token_id, bool) or str(getattr(token_id, "dtype", "")).endswith("bool"):
            raise InvalidValueError("a token id is a boolean", param="token_ids")
        try:
            out += token_id.__index__().to_bytes(4, "little")
        except (AttributeError, TypeError, OverflowError) as error:
            raise InvalidValueError(
                f"{token_id!r} is not a token id (an integer from 0 to 2**32 - 1)",
                param="token_ids",
            ) from error
    return bytes(out)


def decode_token_ids(data: bytes) -> tuple[int, ...]:
    """Invert :func:`encode_token_ids`."""
    if len(data) % 4:
        raise InvalidValueError("encoded token ids are not a multiple of 4 bytes")
    return tuple(memoryview(data).cast("I")) if data else ()


def tenant_namespace(secret: bytes, tenant: str) -> TenantNamespace:
    """The namespace of a tenant: HMAC-SHA256 of its name under the store's secret."""
    return TenantNamespace(hmac.digest(secret, tenant.encode("utf-8", "surrogatepass"), sha256))


def chunk_id(
    namespace: TenantNamespace, tokenizer: TokenizerDigest, token_ids: Sequence[SupportsIndex]
) -> ChunkId:
    """Name a chunk by its tokens, within one tenant and one tokenizer."""
    return ChunkId(
        digest_fields(
            "chunk",
            [
                ("namespace", namespace),
                ("tokenizer", tokenizer),
                ("token_ids", encode_token_ids(token_ids)),
            ],
        )
    )


@dataclass(frozen=True)
class ModelIdentity:
    """Everything about a loaded model that its keys and values depend on.

    Attributes:
        weights: Content digest of the weight files, 32 bytes.
        config: Digest of the architecture fields of the configuration, rope parameters apart.
        rope: Digest of the rope parameters.
        tokenizer: Digest of the tokenizer's definition.
        adapter: Content digest of a merged or attached adapter, if any.
        compute_dtype: ``float32``, ``bfloat16`` or ``float16``.
        weights_format: How the weights were rounded once loaded; None as they came.
        num_threads: Threads that products run on, where bits depend on them; else None.
    """

    weights: bytes
    config: bytes
    rope: bytes
    tokenizer: TokenizerDigest
    adapter: bytes | None
    compute_dtype: str
    weights_format: str | None = None
    num_threads: int | None = None

    def digest(self) -> ModelDigest:
        """One digest over all fields."""
        return ModelDigest(
            digest_fields(
                "model",
                [
                    ("weights", self.weights),
                    ("config", self.config),
                    ("rope", self.rope),
                    ("tokenizer", self.tokenizer),
                    ("adapter", self.adapter),
                    ("compute_dtype", self.compute_dtype),
                    ("weights_format", self.weights_format),
                    ("num_threads", self.num_threads),
                ],
            )
        )


@dataclass(frozen=True)
class EntryIdentity:
    """The fields behind an entry's key, kept beside it so that a mismatch can be explained.

    Attributes:
        model: Digest of the model.
        namespace: Whose data it is.
        preparation: Canonical text of the preparation (``alone``, ``sink(4)``, ...).
        prefix_ids: Token ids the chunk was prefilled behind (dropped afterwards).
        codec: Name of the codec: an answer depends on it, so a key does too.
        token_ids: The chunk's token ids.
        behind: Chunks whose tokens stand in the prefix: an entry holds a trace of them, and goes
            when one of them does. The prefix names them already, so they are neither part of the
            key nor kept with the entry.
        is_loose: Whether it is wanted for a text that is in no document: then RAM alone keeps the
            entry. Neither part of the key nor kept with the entry.
    """

    model: ModelDigest
    namespace: TenantNamespace
    preparation: str
    prefix_ids: tuple[int, ...]
    codec: str
    token_ids: tuple[int, ...]
    behind: tuple[ChunkId, ...] = field(default=(), compare=False)
    is_loose: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        """An entry of no tokens would be a hit that does nothing."""
        if not self.token_ids:
            raise InvalidValueError("a chunk needs at least one token", param="token_ids")

    @property
    def num_prefill_rows(self) -> int:
        """Rows that computing it runs: a prefix of its own is run too, a shared one but once."""
        return len(self.token_ids) + (len(self.prefix_ids) if self.behind else 0)

    def key(self) -> ChunkKey:
        """The entry's key, made once: every layer of the store asks for it at each lookup."""
        return self._key

    @cached_property
    def _key(self) -> ChunkKey:
        return ChunkKey(
            digest_fields(
                "entry",
                [
                    ("format", ENTRY_FORMAT_VERSION),
                    ("model", self.model),
                    ("namespace", self.namespace),
                    ("preparation", self.preparation),
                    ("prefix_ids", encode_token_ids(self.prefix_ids)),
                    ("codec", self.codec),
                    ("token_ids", encode_token_ids(self.token_ids)),
                ],
            )
        )
