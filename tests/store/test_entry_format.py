"""The stored form of an entry: every bit returns, and every kind of damage has a reason."""

from contextlib import suppress
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkcache.codecs import CODECS
from chunkcache.entry import Entry
from chunkcache.errors import InvalidValueError
from chunkcache.identity import ChunkKey, EntryIdentity, ModelDigest, TenantNamespace
from chunkcache.store.entry_format import (
    MAGIC,
    PREFIX_BYTES,
    DamagedEntryError,
    check_entry,
    decode_entry,
    decode_header,
    encode_entry,
    view_entry,
)
from chunkcache.store.tier import MissReason
from chunkcache_kernels.quantised import Scales


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def reason_of(data, identity):
    with pytest.raises(DamagedEntryError) as caught:
        decode_entry(data, identity)
    return caught.value.reason


def with_header(data, change):
    """The entry with its header changed, and the header's checksum made right again."""
    end = PREFIX_BYTES + int.from_bytes(data[len(MAGIC) : PREFIX_BYTES], "little")
    header = msgspec.msgpack.decode(bytes(data[PREFIX_BYTES:end]))
    payload = bytes(data[len(data) - header["payload_bytes"] :])
    change(header)
    encoded = msgspec.msgpack.encode(header)
    front = MAGIC + len(encoded).to_bytes(4, "little") + encoded
    front += xxhash.xxh3_64_digest(front)
    return front.ljust(-(-len(front) // 64) * 64, b"\0") + payload


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("num_tokens", [1, 8, 64, 65])
@pytest.mark.parametrize("read_entry", [decode_entry, view_entry])
def test_an_entry_returns_bit_for_bit(make_entry, codec, num_tokens, read_entry):
    entry = make_entry(codec=codec, num_tokens=num_tokens)
    stored = encode_entry(entry)
    read = read_entry(stored, entry.identity)
    assert torch.equal(bits(read.k), bits(entry.k))
    assert torch.equal(bits(read.v), bits(entry.v))
    assert (read.scales is None) == (CODECS[codec].group_tokens is None)
    if read.scales is not None:
        assert torch.equal(bits(read.scales.k), bits(entry.scales.k))
        assert torch.equal(bits(read.scales.v), bits(entry.scales.v))
        assert read.scales.group_tokens == entry.scales.group_tokens
    header = decode_header(stored)
    assert header.codec == codec
    assert 0 <= header.payload_bytes - entry.num_bytes < 3 * 64
    assert (read.key, read.identity, read.k.dtype) == (entry.key, entry.identity, entry.k.dtype)
    assert read.k.is_contiguous() == (read_entry is decode_entry)


@pytest.mark.parametrize("codec", ["int8", "fp8", "raw32"])
@pytest.mark.parametrize("offset", [0, 4, 13, 16])
def test_an_entry_can_be_read_where_it_lies_at_any_address(make_entry, codec, offset):
    """Aligned memory is viewed, other memory is copied: the numbers are the same."""
    entry = make_entry(codec=codec, num_tokens=9)
    stored = bytes(encode_entry(entry))
    memory = np.zeros(len(stored) + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 16 + offset
    memory[start : start + len(stored)] = np.frombuffer(stored, np.uint8)
    read = view_entry(memory[start : start + len(stored)].data.toreadonly(), entry.identity)
    assert torch.equal(bits(read.k), bits(entry.k))
    memory[:] = 0
    assert bool(bits(read.k).any()) == bool(offset % 16)


def test_a_part_s_odd_size_does_not_misalign_the_next(make_entry):
    entry = make_entry(codec="int8", num_tokens=3, num_kv_heads=1, head_dim=5)
    read = view_entry(encode_entry(entry), entry.identity)
    assert torch.equal(read.k, entry.k)
    assert torch.equal(read.scales.k, entry.scales.k)
    assert all(t.data_ptr() % 4 == 0 for t in (read.scales.k, read.scales.v))


@pytest.mark.parametrize(("codec", "dtype"), [("bf16", torch.bfloat16), ("raw16", torch.float16)])
def test_every_16_bit_pattern_returns(make_entry, codec, dtype):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    entry = make_entry(codec=codec, num_tokens=64)
    k = patterns.reshape(4, 64, 4, 64)
    v = patterns.flip(0).reshape(4, 64, 4, 64)
    read = decode_entry(encode_entry(replace(entry, k=k, v=v)), entry.identity)
    assert torch.equal(read.k.view(torch.int16), k.view(torch.int16))
    assert torch.equal(read.v.view(torch.int16), v.view(torch.int16))


def test_logical_order_is_kept_whatever_the_strides(make_entry):
    entry = make_entry()
    k = torch.randn(2, 16, 8, 3).to(torch.bfloat16).permute(3, 2, 0, 1)
    v = torch.randn(6, 16, 2, 16).to(torch.bfloat16)[::2, ::2]
    read = decode_entry(encode_entry(replace(entry, k=k, v=v)), entry.identity)
    assert torch.equal(read.k, k)
    assert torch.equal(read.v, v)


@pytest.mark.parametrize("offset", [0, 1, 3, 13])
def test_any_alignment_will_do_and_nothing_is_aliased(make_entry, offset):
    entry = make_entry()
    stored = bytes(encode_entry(entry))
    buffer = memoryview(b"\xff" * offset + stored).toreadonly()[offset:]
    read = decode_entry(buffer, entry.identity)
    read.k.mul_(2)
    read.v.zero_()
    assert bytes(buffer) == stored
    again = decode_entry(buffer, entry.identity)
    assert torch.equal(again.k, entry.k)
    assert torch.equal(read.k, entry.k * 2)


def test_layers_lie_one_behind_the_other(make_entry):
    entry = make_entry()
    data = encode_entry(entry)
    header = decode_header(data)
    start = len(data) - header.payload_bytes
    assert start % 64 == 0
    for layer, record in enumerate(header.layers):
        stored = data[start + record.offset : start + record.offset + record.num_bytes]
        assert bytes(stored) == b"".join(bytes(bits(t[layer]).numpy()) for t in (entry.k, entry.v))
    assert header.identity() == entry.identity


def test_a_dtype_that_is_not_the_codecs_is_refused(make_entry):
    entry = make_entry(codec="bf16")
    with pytest.raises(InvalidValueError):
        encode_entry(replace(entry, k=entry.k.float(), v=entry.v.float()))


def test_scales_that_are_not_the_codecs_are_refused(make_entry):
    entry = make_entry(codec="int8", num_tokens=8)
    scales = Scales(entry.scales.k, entry.scales.v, 16)
    with pytest.raises(InvalidValueError):
        encode_entry(replace(entry, scales=scales))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": ModelDigest(b"x" * 32)}, MissReason.FOREIGN_MODEL),
        ({"namespace": TenantNamespace(b"x" * 32)}, MissReason.FOREIGN_NAMESPACE),
        ({"preparation": "sink(4)"}, MissReason.PREPARATION_MISMATCH),
        ({"prefix_ids": (1,)}, MissReason.PREPARATION_MISMATCH),
        ({"codec": "raw16"}, MissReason.CODEC_MISMATCH),
        ({"token_ids": tuple(range(100, 108))}, MissReason.TOKEN_IDS_MISMATCH),
        ({"token_ids": tuple(range(7))}, MissReason.TOKEN_IDS_MISMATCH),
    ],
)
def test_another_identity_is_a_miss_that_says_what_differs(make_entry, change, reason):
    entry = make_entry()
    assert reason_of(encode_entry(entry), replace(entry.identity, **change)) is reason


@pytest.mark.parametrize("version", [0, 1, 3, -1, 1.5, True, None, "1", [1], {"a": 1}, 2**64 - 1])
def test_another_format_version_is_a_miss(make_entry, version):
    entry = make_entry()
    data = with_header(encode_entry(entry), lambda header: header.update(format=version))
    assert reason_of(data, entry.identity) is MissReason.FORMAT_VERSION


def test_a_header_of_another_version_may_have_other_fields(make_entry):
    entry = make_entry()

    def change(header):
        header.clear()
        header.update(format=7, payload_bytes=0, whatever=[1, 2])

    data = with_header(encode_entry(entry), change)
    assert reason_of(data, entry.identity) is MissReason.FORMAT_VERSION


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda h: h.update(shape=[3, 8, 2, 17]), MissReason.SHAPE),
        (lambda h: h.update(shape=[3, 2, 8, 16]), MissReason.SHAPE),
        (lambda h: h.update(shape=[-3, 8, -2, 16]), MissReason.SHAPE),
        (lambda h: h.update(shape=[3, 8, 2]), MissReason.CORRUPT_HEADER),
        (lambda h: h.update(dtype="float32"), MissReason.SHAPE),
        (lambda h: h.update(layers=h["layers"][:2]), MissReason.SHAPE),
        (lambda h: h["layers"][0].__setitem__(0, 64), MissReason.SHAPE),
        (lambda h: h["layers"][0].__setitem__(1, 64), MissReason.SHAPE),
        (lambda h: h["layers"][0].__setitem__(2, 1), MissReason.CHECKSUM),
        (lambda h: h.update(group_tokens=64), MissReason.SHAPE),
        (lambda h: h.update(payload_bytes=1 << 50), MissReason.SHAPE),
        (lambda h: h.update(token_ids=b"abc"), MissReason.TOKEN_IDS_MISMATCH),
        (lambda h: h.pop("codec"), MissReason.CORRUPT_HEADER),
    ],
)
def test_a_header_that_contradicts_itself_is_a_miss(make_entry, change, reason):
    entry = make_entry()
    assert reason_of(with_header(encode_entry(entry), change), entry.identity) is reason


def test_a_header_whose_checksum_is_wrong_is_a_miss(make_entry):
    entry = make_entry()
    data = bytearray(encode_entry(entry))
    data[PREFIX_BYTES + 3] ^= 1
    assert reason_of(data, entry.identity) is MissReason.CORRUPT_HEADER
    data[:200] = bytes(200)
    assert reason_of(data, entry.identity) is MissReason.CORRUPT_HEADER


def test_half_an_entry_is_a_miss(make_entry):
    entry = make_entry()
    data = encode_entry(entry)
    for length in (0, 5, PREFIX_BYTES, 100, len(data) // 2, len(data) - 1):
        assert reason_of(data[:length], entry.identity) is MissReason.TRUNCATED
    assert reason_of(bytes(data) + b"\0", entry.identity) is MissReason.TRUNCATED


def test_check_entry_wants_the_entry_under_its_own_key(make_entry):
    entry, other = make_entry(1), make_entry(2)
    check_entry(encode_entry(entry), entry.key)
    with pytest.raises(DamagedEntryError):
        check_entry(encode_entry(entry), other.key)


SMALL_IDENTITY = EntryIdentity(
    ModelDigest(b"m" * 32), TenantNamespace(b"n" * 32), "alone", (), "raw32", (1, 2)
)
SMALL = bytes(
    encode_entry(
        Entry(
            SMALL_IDENTITY,
            SMALL_IDENTITY.key(),
            k=torch.arange(8.0).reshape(2, 2, 1, 2),
            v=torch.arange(8.0, 16).reshape(2, 2, 1, 2),
        )
    )
)


SMALL_INT8_IDENTITY = replace(SMALL_IDENTITY, codec="int8")
SMALL_INT8 = bytes(
    encode_entry(
        Entry(
            SMALL_INT8_IDENTITY,
            SMALL_INT8_IDENTITY.key(),
            k=torch.arange(8).char().reshape(2, 2, 1, 2),
            v=torch.arange(8, 16).char().reshape(2, 2, 1, 2),
            scales=Scales(torch.arange(4.0).reshape(2, 1, 1, 2), torch.ones(2, 2, 1), 64),
        )
    )
)


def decodes_or_is_damaged(data):
    try:
        return decode_entry(data, SMALL_IDENTITY)
    except DamagedEntryError:
        return None


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, len(SMALL) - 1), flip=st.integers(1, 255))
def test_a_changed_byte_is_never_served(position, flip):
    data = bytearray(SMALL)
    data[position] ^= flip
    read = decodes_or_is_damaged(data)
    if read is not None:
        # Only the padding is outside every checksum.
        assert torch.equal(read.k.flatten(), torch.arange(8.0))
        assert torch.equal(read.v.flatten(), torch.arange(8.0, 16))


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, len(SMALL_INT8) - 1), flip=st.integers(1, 255))
def test_a_changed_byte_of_a_quantised_entry_is_never_served(position, flip):
    """Scales are under the checksum as the elements are."""
    data = bytearray(SMALL_INT8)
    data[position] ^= flip
    for read_entry in (decode_entry, view_entry):
        try:
            read = read_entry(memoryview(data), SMALL_INT8_IDENTITY)
        except DamagedEntryError:
            continue
        assert torch.equal(read.k.flatten(), torch.arange(8).char())
        assert torch.equal(read.v.flatten(), torch.arange(8, 16).char())
        assert torch.equal(read.scales.k.flatten(), torch.arange(4.0))
        assert torch.equal(read.scales.v, torch.ones(2, 2, 1))


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=400))
def test_random_bytes_are_damage_and_nothing_else(data):
    assert decodes_or_is_damaged(data) is None
    with pytest.raises(DamagedEntryError):
        check_entry(data, ChunkKey(b"k" * 32))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.binary(max_size=8)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
FIELDS = sorted(msgspec.msgpack.decode(msgspec.msgpack.encode(decode_header(SMALL))))


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(FIELDS), value=JSON)
def test_a_header_with_any_value_and_a_right_checksum_is_damage_or_the_same(name, value):
    data = with_header(memoryview(SMALL), lambda header: header.update({name: value}))
    read = decodes_or_is_damaged(data)
    if read is not None:
        assert torch.equal(read.k.flatten(), torch.arange(8.0))
    with suppress(DamagedEntryError):
        check_entry(data, SMALL_IDENTITY.key())


@settings(max_examples=200, deadline=None)
@given(header=st.binary(max_size=200))
def test_any_header_bytes_with_a_right_checksum_are_damage(header):
    front = MAGIC + len(header).to_bytes(4, "little") + header
    front += xxhash.xxh3_64_digest(front)
    assert decodes_or_is_damaged(front.ljust(1_024, b"\0")) is None
