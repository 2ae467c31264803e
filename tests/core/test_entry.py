"""Entries and codecs as values."""

import pytest
import torch

from chunkcache.codecs import codec_by_name
from chunkcache.entry import Entry
from chunkcache.errors import InvalidValueError
from chunkcache.identity import EntryIdentity, ModelDigest, TenantNamespace

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


@pytest.mark.parametrize("name", ["int8", "fp8", "", "BF16"])
def test_unknown_codecs_are_refused(name: str) -> None:
    with pytest.raises(InvalidValueError, match="unknown codec"):
        codec_by_name(name, torch.float32)


def test_a_codec_that_would_overflow_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="overflow"):
        codec_by_name("raw16", torch.float32)
