"""Entries and codecs as values."""

import pytest
import torch

from chunkcache.codecs import CODECS, LayerEncoder, codec_by_name
from chunkcache.entry import Entry, EntryShape
from chunkcache.errors import InvalidValueError
from chunkcache.identity import EntryIdentity, ModelDigest, TenantNamespace
from chunkcache_kernels.quantised import Scales, dequantise

IDENTITY = EntryIdentity(
    ModelDigest(b"m" * 32), TenantNamespace(b"n" * 32), "alone", (), "raw32", (5, 6, 7)
)


def _entry(k: torch.Tensor, v: torch.Tensor) -> Entry:
    return Entry(IDENTITY, IDENTITY.key(), k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("index", [0, 23, 47])
def test_one_bad_element_is_found(dtype: torch.dtype, value: float, where: str, index: int) -> None:
    tensors = {n: torch.randn(2, 3, 2, 4).to(dtype) for n in ("k", "v")}
    assert _entry(**tensors).is_finite()
    tensors[where].view(-1)[index] = value
    assert not _entry(**tensors).is_finite()


@pytest.mark.parametrize(
    ("k", "v"),
    [((2, 3, 2, 4), (2, 3, 2, 5)), ((2, 4, 2, 4), (2, 4, 2, 4)), ((3, 2, 4), (3, 2, 4))],
)
def test_shapes_that_do_not_fit_are_refused(k: tuple[int, ...], v: tuple[int, ...]) -> None:
    with pytest.raises(InvalidValueError):
        _entry(torch.zeros(k), torch.zeros(v))


def test_an_entry_of_no_tokens_cannot_be_named() -> None:
    with pytest.raises(InvalidValueError):
        EntryIdentity(ModelDigest(b"m"), TenantNamespace(b"n"), "alone", (), "bf16", ())


def test_raw_keeps_the_compute_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert codec_by_name("raw", dtype).dtype == dtype


def test_bytes_per_token_of_the_demo_model() -> None:
    assert codec_by_name("bf16", torch.float32).bytes_per_token(30, 3, 64) == 23_040
    assert codec_by_name("raw", torch.float32).bytes_per_token(30, 3, 64) == 46_080
    for name in ("int8", "fp8"):
        assert codec_by_name(name, torch.float32).bytes_per_token(30, 3, 64) == 12_240


@pytest.mark.parametrize("num_tokens", [64, 65, 100, 256, 1000])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_quantised_entries_are_smaller_than_0_55_of_bf16(name: str, num_tokens: int) -> None:
    """Scales included, whatever is left over in the last group, from the smallest fused chunk on."""
    shape = EntryShape(30, num_tokens, 3, 64)
    encoder = LayerEncoder(codec_by_name(name, torch.float32), shape)
    assert encoder.scales is not None
    num_bytes = encoder.k.nbytes + encoder.v.nbytes + encoder.scales.num_bytes
    assert num_bytes <= 0.55 * 23_040 * num_tokens


@pytest.mark.parametrize("name", sorted(CODECS))
def test_a_codec_keeps_numbers_as_closely_as_it_says(name: str) -> None:
    """One channel of K is fifty times the others, as it is before RoPE."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(70, 2, 32, generator=generator) for _ in range(2))
    k[..., 5] *= 50
    encoder = LayerEncoder(CODECS[name], EntryShape(1, 70, 2, 32))
    encoder.write(0, k, v)
    step = {"raw32": 0.0, "raw16": 2**-11, "bf16": 2**-8, "int8": 1 / 254, "fp8": 1 / 16}[name]
    if encoder.scales is None:
        back = encoder.k.float(), encoder.v.float()
        bound = k.abs() * step, v.abs() * step
    else:
        back = dequantise(encoder.k, encoder.v, encoder.scales)
        peaks = k.abs().split(64), v.abs().amax(-1, keepdim=True)
        largest = torch.cat([p.amax(0).expand(len(p), -1, -1) for p in peaks[0]])
        bound = largest * step, peaks[1] * step
    assert ((back[0][0] - k).abs() <= bound[0] * 1.0001).all()
    assert ((back[1][0] - v).abs() <= bound[1] * 1.0001).all()


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["k", "v"])
def test_what_is_not_finite_is_found_in_quantised_entries(
    name: str, value: float, where: str
) -> None:
    numbers = {n: torch.randn(3, 2, 4) for n in ("k", "v")}
    for is_bad in (False, True):
        if is_bad:
            numbers[where][1, 1, 2] = value
        encoder = LayerEncoder(CODECS[name], EntryShape(1, 3, 2, 4))
        encoder.write(0, numbers["k"], numbers["v"])
        entry = Entry(IDENTITY, IDENTITY.key(), encoder.k, encoder.v, encoder.scales)
        assert entry.is_finite() is not is_bad


def test_an_fp8_element_that_is_not_a_number_is_found() -> None:
    encoder = LayerEncoder(CODECS["fp8"], EntryShape(1, 3, 2, 4))
    encoder.write(0, torch.randn(3, 2, 4), torch.randn(3, 2, 4))
    encoder.k.view(torch.uint8)[0, 1, 0, 3] = 0xFF
    assert not Entry(IDENTITY, IDENTITY.key(), encoder.k, encoder.v, encoder.scales).is_finite()


def test_elements_and_scales_come_together() -> None:
    scales = Scales(torch.ones(1, 1, 2, 4), torch.ones(1, 3, 2), 64)
    small, wide = torch.zeros(1, 3, 2, 4).char(), torch.zeros(1, 3, 2, 4)
    Entry(IDENTITY, IDENTITY.key(), small, small, scales)
    for tensor, found in ((small, None), (wide, scales)):
        with pytest.raises(InvalidValueError, match="not an entry"):
            Entry(IDENTITY, IDENTITY.key(), tensor, tensor, found)
    with pytest.raises(InvalidValueError, match="not an entry"):
        Entry(IDENTITY, IDENTITY.key(), small[..., :2], small[..., :2], scales)


@pytest.mark.parametrize("name", ["int4", "q8_0", "", "BF16"])
def test_unknown_codecs_are_refused(name: str) -> None:
    with pytest.raises(InvalidValueError, match="unknown codec"):
        codec_by_name(name, torch.float32)


def test_a_codec_that_would_overflow_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="overflow"):
        codec_by_name("raw16", torch.float32)
