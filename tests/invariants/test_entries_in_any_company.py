"""Invariant 4, of entries: the same bits alone or in a pack, and on any number of threads."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from chunkcache.codecs import codec_by_name
from chunkcache.entry import Entry
from chunkcache.identity import EntryIdentity, TenantNamespace
from chunkcache.model.families import FAMILIES
from chunkcache.model.prefill import MAX_PACK_ROWS, IsolatedPrefill
from chunkcache.model.runner import ModelRunner
from chunkcache.testing import TINY_FAMILIES

NUM_TOKENS = (1, 2, 5, 6, 7, 10, 11, 15, 16, 17, 33, 127, 129, 130, 257)
"""Around where a library's products and blocks of rows take other paths."""
NUM_PREFIX = (0, 4, 6, 40)


@pytest.fixture
def on_threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads; it is set back behind the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _identities(runner: ModelRunner, num_prefix: int) -> list[EntryIdentity]:
    generator = torch.Generator().manual_seed(num_prefix)

    def draw(num_tokens: int) -> tuple[int, ...]:
        return tuple(torch.randint(17, 400, (num_tokens,), generator=generator).tolist())

    prefix = draw(num_prefix)
    return [
        EntryIdentity(runner.digest, TenantNamespace(b"n"), "preamble", prefix, "raw", draw(n))
        for n in NUM_TOKENS
    ]


def _alone(runner: ModelRunner, identities: list[EntryIdentity]) -> list[Entry]:
    prefill, codec = IsolatedPrefill(runner), codec_by_name("raw", runner.dtype)
    return [prefill.compute(identity, codec) for identity in identities]


def _assert_same_bits(entries: list[Entry], others: list[Entry]) -> None:
    for entry, other in zip(entries, others, strict=True):
        assert entry.identity == other.identity
        assert torch.equal(entry.k, other.k), entry.num_tokens
        assert torch.equal(entry.v, other.v), entry.num_tokens


@pytest.mark.parametrize("num_prefix", NUM_PREFIX)
@pytest.mark.parametrize("family", [f for f in TINY_FAMILIES if not FAMILIES[f].experts])
def test_an_entry_is_the_same_in_a_pack_and_on_any_number_of_threads(
    bench_of: Callable[..., Any],
    on_threads: Callable[[int], None],
    family: str,
    num_prefix: int,
) -> None:
    runner = bench_of(family).runner
    assert runner.identity.num_threads is None
    identities = _identities(runner, num_prefix)
    expected = _alone(runner, identities)
    for num_threads in (2, 3, 5):
        on_threads(num_threads)
        _assert_same_bits(_alone(runner, identities), expected)

    prefill, codec = IsolatedPrefill(runner), codec_by_name("raw", runner.dtype)
    assert prefill.num_packed(identities) == len(identities)
    steps = prefill.steps(identities, codec)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            _assert_same_bits(stop.value, expected)
            break
    assert prefill.num_rows == num_prefix + sum(NUM_TOKENS)


@pytest.mark.parametrize("family", [f for f in TINY_FAMILIES if FAMILIES[f].experts])
def test_where_bits_depend_on_threads_they_are_part_of_the_identity(
    load_tiny: Callable[..., Any], on_threads: Callable[[int], None], family: str
) -> None:
    on_one = load_tiny(family).runner
    on_threads(2)
    on_two = load_tiny(family).runner
    assert (on_one.identity.num_threads, on_two.identity.num_threads) == (1, 2)
    assert on_one.digest != on_two.digest
    identities = _identities(on_two, 0)
    assert IsolatedPrefill(on_two).num_packed(identities) == 1


def test_packs_are_bounded_and_stand_behind_one_prefix(bench_of: Callable[..., Any]) -> None:
    runner = bench_of("llama").runner
    prefill = IsolatedPrefill(runner)
    near, far = _identities(runner, 4), _identities(runner, 6)
    assert prefill.num_packed([*near[:3], *far]) == 3
    third = tuple(range(17, 17 + MAX_PACK_ROWS // 3))
    many = [
        EntryIdentity(runner.digest, TenantNamespace(b"n"), "alone", (), "raw", (*third, i))
        for i in range(17, 22)
    ]
    assert prefill.num_packed(many) == 2
    whole = EntryIdentity(
        runner.digest, TenantNamespace(b"n"), "alone", (), "raw", (17,) * (MAX_PACK_ROWS + 1)
    )
    assert prefill.num_packed([whole, *many]) == 1
    assert prefill.num_packed([many[0], whole]) == 1
