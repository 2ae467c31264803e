"""``attend_decode``: against the reference, and a row's bits whatever is around it."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkcache_kernels.attend_decode.op import attend_decode
from chunkcache_kernels.attend_decode.spec import ATTEND_DECODE
from chunkcache_kernels.attend_rows.op import attend_rows
from chunkcache_kernels.checks import KernelArgumentError
from chunkcache_kernels.implementation import Implementation, use_implementation
from chunkcache_kernels.paged import DecodeBatch, KeySlots, flat_slots

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one token": {"lengths": (1,)},
    "pages in order": {"scattered": False},
    "one KV head": {"num_kv_heads": 1, "lengths": (40,)},
    "a KV head each": {"num_query_heads": 2, "num_kv_heads": 2, "lengths": (40,)},
    "window": {"window": 20},
    "window of one": {"window": 1},
    "softcap": {"softcap": 5.0},
    "softcap and window": {"softcap": 5.0, "window": 70},
    "bf16": {"dtype": torch.bfloat16},
    "odd head dim": {"head_dim": 20, "lengths": (40,)},
    "pages of five slots": {"page_tokens": 5, "lengths": (23, 64)},
    "only padding": {"lengths": (0, 0)},
    "several splits": {"lengths": (1030, 512), "num_query_heads": 2, "num_kv_heads": 1},
    "a window across splits": {
        "lengths": (1100,),
        "window": 600,
        "num_query_heads": 2,
        "num_kv_heads": 1,
    },
}


@pytest.mark.parametrize("implementation", ATTEND_DECODE.implementations[1:])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_equals_the_reference(implementation: Implementation, shape: dict[str, Any]):
    inputs = ATTEND_DECODE.make_inputs(1, **{"lengths": (33, 0, 1, 150), **shape})
    ATTEND_DECODE.check(implementation, inputs, shape.get("dtype", torch.float32))


@pytest.mark.parametrize("implementation", ATTEND_DECODE.implementations)
@pytest.mark.parametrize("window", [None, 30])
def test_equals_attend_rows_of_the_last_row(implementation: Implementation, window: int | None):
    inputs = ATTEND_DECODE.make_inputs(2, lengths=(75,), window=window)
    tables, tokens = inputs["batch"].block_tables.long(), torch.arange(75)
    keys = KeySlots.of(tables[0, tokens // 16] * 16 + tokens % 16, tokens)
    shared = {name: inputs[name] for name in ("q", "k_pages", "v_pages", "scale", "window")}
    with use_implementation("reference"):
        expected = attend_rows(**shared, keys=keys, query_positions=torch.tensor([74]))
    with use_implementation(implementation):
        attended = attend_decode(**inputs)
    torch.testing.assert_close(attended, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ATTEND_DECODE.implementations)
def test_padding_rows_are_zero(implementation: Implementation):
    inputs = ATTEND_DECODE.make_inputs(3, lengths=(0, 17, 0))
    with use_implementation(implementation):
        out = attend_decode(**inputs)
    assert torch.equal(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    assert out[1].isfinite().all()
    assert (out[1] != 0).any()


def alone(inputs: dict[str, Any], b: int) -> dict[str, Any]:
    batch = inputs["batch"]
    own = DecodeBatch(batch.block_tables[b : b + 1], batch.lengths[b : b + 1], batch.page_tokens)
    return {**inputs, "q": inputs["q"][b : b + 1], "batch": own}


def relaid(inputs: dict[str, Any], pages: torch.Tensor, num_pages: int) -> dict[str, Any]:
    """Move the one sequence of ``inputs`` to other pages; all other slots hold NaN."""
    batch = inputs["batch"]
    num_blocks = pages.shape[0]
    moved: dict[str, Any] = {}
    for name in ("k_pages", "v_pages"):
        old = inputs[name]
        moved[name] = torch.full((num_pages, *old.shape[1:]), float("nan"), dtype=old.dtype)
        moved[name][pages] = old[batch.block_tables[0, :num_blocks].long()]
    tables = pages[None].to(torch.int32)
    return {**inputs, **moved, "batch": DecodeBatch(tables, batch.lengths, batch.page_tokens)}


def check_bits_alone_and_in_company(lengths: tuple[int, ...], seed: int, **shape: Any) -> None:
    inputs = dict(ATTEND_DECODE.make_inputs(seed, lengths=lengths, **shape))
    together = attend_decode(**inputs)
    for b in range(len(lengths)):
        assert torch.equal(attend_decode(**alone(inputs, b))[0], together[b])


def check_bits_in_any_pages(length: int, seed: int, **shape: Any) -> None:
    inputs = dict(ATTEND_DECODE.make_inputs(seed, lengths=(length,), **shape))
    num_blocks = -(-length // inputs["batch"].page_tokens)
    num_pages = 2 * num_blocks + 3
    shuffled = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    half = torch.cat((torch.arange(num_blocks // 2), num_blocks + torch.arange(num_blocks)))
    expected = attend_decode(**inputs)
    for pages in (torch.arange(num_blocks) + 3, shuffled[:num_blocks], half[:num_blocks]):
        assert torch.equal(attend_decode(**relaid(inputs, pages, num_pages)), expected)


SHAPE = {
    "head_dim": st.sampled_from([4, 24, 64]),
    "window": st.none() | st.integers(1, 200),
    "softcap": st.none() | st.just(4.0),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
    "seed": st.integers(0, 99),
}


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=6).map(tuple), **SHAPE)
def test_cpu_bits_do_not_depend_on_company(lengths: tuple[int, ...], seed: int, **shape: Any):
    check_bits_alone_and_in_company(lengths, seed, **shape)


@settings(max_examples=25, deadline=None)
@given(length=st.integers(1, 2500), page_tokens=st.sampled_from([5, 16, 64]), **SHAPE)
def test_cpu_bits_do_not_depend_on_pages(length: int, seed: int, **shape: Any):
    check_bits_in_any_pages(length, seed, **shape)


@pytest.mark.parametrize("shape", [{}, {"window": 90, "softcap": 4.0}, {"dtype": torch.bfloat16}])
def test_triton_bits_do_not_depend_on_company_or_pages(shape: dict[str, Any]):
    small = {"num_query_heads": 2, "num_kv_heads": 1, **shape}
    with use_implementation("triton"):
        check_bits_alone_and_in_company((530, 0, 40), 4, **small)
        check_bits_in_any_pages(200, 5, **small)


@pytest.mark.parametrize("implementation", ATTEND_DECODE.implementations)
def test_slots_after_the_end_may_hold_anything(implementation: Implementation):
    inputs = dict(ATTEND_DECODE.make_inputs(6, lengths=(18,)))
    page = int(inputs["batch"].block_tables[0, 1])
    assert flat_slots(inputs["k_pages"])[page * 16 + 2 : page * 16 + 16].isnan().all()
    with use_implementation(implementation):
        assert attend_decode(**inputs).isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 6, 16)}, r"q has shape \(3, 6, 16\), expected \(4, 6, 16\)"),
        ({"q": torch.zeros(4, 5, 16)}, "5 query heads are not a multiple of 2 KV heads"),
        ({"q": torch.zeros(4, 6, 16).half()}, "q is torch.float16"),
        ({"window": -1}, "window must be positive, got -1"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"k_pages": torch.zeros(2, 8, 2, 16)}, "k_pages has shape"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, Any], message: str):
    inputs = ATTEND_DECODE.make_inputs(7)
    with pytest.raises(KernelArgumentError, match=message):
        attend_decode(**{**inputs, **change})


def test_the_floor_counts_only_the_window():
    inputs = ATTEND_DECODE.make_inputs(8, lengths=(10, 0, 3), window=4, head_dim=16)
    floor = ATTEND_DECODE.floor(inputs)
    assert floor.num_flops == 4 * 7 * 6 * 16
    assert floor.moved_bytes == 4 * (2 * 3 * 6 * 16 + 2 * 7 * 2 * 16)
