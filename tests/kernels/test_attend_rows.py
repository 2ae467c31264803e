"""``attend_rows`` and ``column_mass``: against the reference, by position, blind to layout."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkcache_kernels.attend_rows import cpu
from chunkcache_kernels.attend_rows.op import attend_rows, column_mass
from chunkcache_kernels.attend_rows.spec import ATTEND_ROWS, COLUMN_MASS
from chunkcache_kernels.checks import KernelArgumentError
from chunkcache_kernels.implementation import Implementation, use_implementation
from chunkcache_kernels.paged import KeySlots, flat_slots
from chunkcache_kernels.spec import OperatorSpec

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one token": {"num_tokens": 1, "num_rows": 1},
    "one row": {"num_rows": 1},
    "one run": {"scattered": False},
    "every row": {"num_rows": 150, "scattered": False},
    "more than a block of rows": {"num_rows": 140},
    "many blocks of rows": {"num_tokens": 700, "num_rows": 300},
    "blocks without a key that all see": {"num_tokens": 320, "num_rows": 310},
    "bf16 in blocks": {"dtype": torch.bfloat16, "num_tokens": 400, "num_rows": 200},
    "one KV head": {"num_kv_heads": 1},
    "a KV head each": {"num_query_heads": 3, "num_kv_heads": 3},
    "window": {"window": 20, "num_rows": 140},
    "window over every row": {"window": 20, "num_rows": 150},
    "window of one": {"window": 1},
    "window wider than all": {"window": 1000, "num_rows": 150},
    "softcap": {"softcap": 5.0, "num_rows": 90},
    "softcap and window": {"softcap": 5.0, "window": 33, "num_rows": 150},
    "bf16": {"dtype": torch.bfloat16, "num_rows": 90},
    "bf16 softcap": {"dtype": torch.bfloat16, "softcap": 5.0},
    "odd head dim": {"head_dim": 20},
    "pages of five slots": {"page_tokens": 5},
}


@pytest.fixture(
    scope="module", params=[1, None], ids=["small tiles", "tiles as they are"], autouse=True
)
def _tile_bytes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds whether keys fill many tiles or one."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param is not None:
            patch.setattr(cpu, "TILE_BYTES", request.param)
        yield


@pytest.mark.parametrize("spec", [ATTEND_ROWS, COLUMN_MASS], ids=lambda spec: spec.name)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_cpu_path_equals_the_reference(spec: OperatorSpec, shape: dict[str, Any]):
    inputs = spec.make_inputs(1, **shape)
    spec.check("cpu", inputs, shape.get("dtype", torch.float32))


@pytest.mark.parametrize("implementation", ATTEND_ROWS.implementations)
@pytest.mark.parametrize("num_rows", [60, 20])
def test_equals_plain_causal_attention(implementation: Implementation, num_rows: int):
    """Both attend the last ``num_rows`` rows of one sequence.

    1. ours: rows over paged keys, masked by position;
    2. torch: the whole sequence with a lower-triangular mask, then its last rows.
    """
    inputs = ATTEND_ROWS.make_inputs(2, num_tokens=60, num_rows=60)
    keys = inputs["keys"]
    k, v = (keys.read(inputs[name]).transpose(0, 1) for name in ("k_pages", "v_pages"))
    expected = F.scaled_dot_product_attention(
        inputs["q"].transpose(0, 1),
        k.repeat_interleave(3, 0),
        v.repeat_interleave(3, 0),
        torch.ones(60, 60, dtype=torch.bool).tril(),
    ).transpose(0, 1)[-num_rows:]
    tail = {"q": inputs["q"][-num_rows:], "query_positions": torch.arange(60 - num_rows, 60)}
    with use_implementation(implementation):
        attended = attend_rows(**{**inputs, **tail})
    torch.testing.assert_close(attended, expected, rtol=1e-4, atol=1e-5)


def test_triton_is_not_offered_and_the_reference_runs_instead():
    inputs = ATTEND_ROWS.make_inputs(3)
    with use_implementation("triton"):
        assert torch.equal(attend_rows(**inputs), ATTEND_ROWS.reference(inputs)[0])


@settings(max_examples=30, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99))
def test_any_positions_window_and_slots_are_masked_alike(data: st.DataObject, seed: int):
    """Any strictly ascending rows over keys of any positions, in any order, in any slots."""
    source = torch.Generator().manual_seed(seed)
    positions = data.draw(st.lists(st.integers(0, 300), unique=True, min_size=1, max_size=90))
    rows = data.draw(
        st.lists(st.integers(0, 300), unique=True, min_size=1, max_size=90).map(sorted)
    )
    window = data.draw(st.none() | st.integers(1, 200))
    softcap = data.draw(st.none() | st.just(3.0))
    if data.draw(st.booleans()):
        positions.sort()
    slots = torch.randperm(200, generator=source)[: len(positions)]
    pages = torch.full((2, 50, 4, 1, 8), float("nan"))
    last = max(rows)
    written = slots[torch.tensor(positions) <= last]
    for side in pages:
        flat_slots(side)[written] = torch.randn(len(written), 1, 8, generator=source)
    inputs = {
        "q": torch.randn(len(rows), 2, 8, generator=source),
        "k_pages": pages[0],
        "v_pages": pages[1],
        "keys": KeySlots.of(slots, torch.tensor(positions)),
        "query_positions": torch.tensor(rows),
        "scale": 0.5,
        "window": window,
        "softcap": softcap,
    }
    ATTEND_ROWS.check("cpu", inputs, torch.float32)
    COLUMN_MASS.check("cpu", inputs, torch.float32)
    attended = attend_rows(**inputs)
    assert attended.isfinite().all()
    for i, row in enumerate(rows):
        if not any(p <= row and (window is None or p > row - window) for p in positions):
            assert (attended[i] == 0).all(), "a row that sees no key gives zeros"


def test_bf16_is_rounded_twice_however_many_tiles_there_are(monkeypatch: pytest.MonkeyPatch):
    """Once as a tile gives it and once at the end: independent errors, the square root of two."""
    inputs = dict(ATTEND_ROWS.make_inputs(7, num_tokens=2_000, num_rows=40, dtype=torch.bfloat16))
    exact = {n: v.float() if n in ("q", "k_pages", "v_pages") else v for n, v in inputs.items()}
    expected = ATTEND_ROWS.reference(exact)[0]

    def error(tile_bytes: int) -> float:
        monkeypatch.setattr(cpu, "TILE_BYTES", tile_bytes)
        keys = KeySlots.of(inputs["keys"].slots, inputs["keys"].positions)
        attended = attend_rows(**{**inputs, "keys": keys})
        return float((attended.float() - expected).square().mean().sqrt())

    assert error(1) < 2**0.5 * error(1 << 40)


@pytest.mark.parametrize(
    ("positions", "rows", "window"),
    [
        ([0, 10, 20], [5, 15, 30], 2),
        ([88, 165, 199], [116, 117, 140, 192, 296], 6),
        ([27, 128, 140, 213, 257], [32, 109, 161, 217], 2),
        ([0, 10, 20], [0, 15, 20, 30], 2),
    ],
)
def test_rows_between_the_keys_of_a_window_see_nothing(
    positions: list[int], rows: list[int], window: int
):
    """A part of such rows alone has no keys, on which the library's attention divides by zero."""
    inputs = dict(ATTEND_ROWS.make_inputs(1, num_tokens=len(positions), num_rows=len(rows)))
    slots = inputs["keys"].slots
    inputs["keys"] = KeySlots.of(slots, torch.tensor(positions))
    inputs["q"] = torch.randn(len(rows), *inputs["q"].shape[1:])
    inputs |= {"query_positions": torch.tensor(rows), "window": window, "softcap": None}
    ATTEND_ROWS.check("cpu", inputs, torch.float32)
    attended = attend_rows(**inputs)
    for row, position in zip(attended, rows, strict=True):
        sees_a_key = any(position - window < p <= position for p in positions)
        assert bool(row.any()) == sees_a_key


@settings(max_examples=25, deadline=None)
@given(
    num_tokens=st.integers(1, 200),
    rows_ratio=st.sampled_from([0.1, 0.5, 1.0]),
    num_kv_heads=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([4, 8, 24, 64]),
    window=st.none() | st.integers(1, 100),
    softcap=st.none() | st.just(4.0),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    offset=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_same_bits_in_one_run_and_scattered(
    num_tokens: int,
    rows_ratio: float,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    offset: int,
    seed: int,
):
    inputs = ATTEND_ROWS.make_inputs(
        seed,
        num_tokens=num_tokens,
        num_rows=max(1, int(num_tokens * rows_ratio)),
        num_query_heads=3 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=window,
        softcap=softcap,
        dtype=dtype,
    )
    run = torch.arange(num_tokens) + offset
    shape = (num_tokens + 40, 1, num_kv_heads, head_dim)
    moved: dict[str, Any] = {"keys": KeySlots.of(run, inputs["keys"].positions)}
    for name in ("k_pages", "v_pages"):
        moved[name] = torch.full(shape, float("nan"), dtype=dtype)
        flat_slots(moved[name])[run] = inputs["keys"].read(inputs[name])
    for spec in (ATTEND_ROWS, COLUMN_MASS):
        for a, b in zip(spec.run(inputs), spec.run({**inputs, **moved}), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("implementation", ATTEND_ROWS.implementations)
def test_keys_behind_every_row_may_hold_anything(implementation: Implementation):
    inputs = dict(ATTEND_ROWS.make_inputs(4, num_tokens=100, num_rows=100))
    inputs["q"], inputs["query_positions"] = inputs["q"][:40], torch.arange(40)
    later = inputs["keys"].slots[40:]
    damaged = dict(inputs)
    for name in ("k_pages", "v_pages"):
        damaged[name] = inputs[name].clone()
        flat_slots(damaged[name])[later] = float("nan")
    with use_implementation(implementation):
        for spec in (ATTEND_ROWS, COLUMN_MASS):
            for a, b in zip(spec.run(inputs), spec.run(damaged), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("window", [None, 70, 200])
@pytest.mark.parametrize("first", [0, 1, 50, 119])
def test_a_tail_of_keys_ignores_what_lies_behind_it(first: int, window: int | None):
    """Rows ``first..120`` of a sequence whose later keys are not written yet.

    1. the CPU path over all keys, NaN behind the last row;
    2. the reference over the first 120 keys.
    """
    inputs = dict(ATTEND_ROWS.make_inputs(5, num_tokens=150, num_rows=150, window=window))
    rows = slice(first, 120)
    inputs |= {"q": inputs["q"][rows], "query_positions": torch.arange(first, 120)}
    with use_implementation("reference"):
        expected = attend_rows(**inputs | {"keys": inputs["keys"].prefix(120)})
    behind = inputs["keys"].slots[120:]
    for name in ("k_pages", "v_pages"):
        inputs[name] = inputs[name].clone()
        flat_slots(inputs[name])[behind] = float("nan")
    with use_implementation("cpu"):
        attended = attend_rows(**inputs)
    torch.testing.assert_close(attended, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", ATTEND_ROWS.implementations)
def test_column_mass_is_the_probabilities_reduced(implementation: Implementation):
    """Two rows of two heads, small enough to say what each key gets.

    Keys are zero, so each row spreads its attention evenly over what it sees: row 0 sees key 0,
    row 1 sees keys 0 and 1; key 2 is seen by none.
    """
    keys = KeySlots.of(torch.arange(3), torch.arange(3))
    inputs: dict[str, Any] = {
        "q": torch.ones(2, 2, 4),
        "k_pages": torch.zeros(1, 3, 1, 4),
        "keys": keys,
        "query_positions": torch.arange(2),
        "scale": 1.0,
    }
    with use_implementation(implementation):
        total = column_mass(**inputs, reduce="sum")
        root = column_mass(**inputs, reduce="l2")
    torch.testing.assert_close(total, torch.tensor([2 * 1.5, 2 * 0.5, 0.0]))
    torch.testing.assert_close(root, torch.tensor([1.25**0.5, 0.5, 0.0]))


@pytest.mark.parametrize("implementation", ATTEND_ROWS.implementations)
def test_no_rows_and_no_keys(implementation: Implementation):
    inputs = dict(ATTEND_ROWS.make_inputs(5))
    nothing = torch.zeros(0, dtype=torch.int64)
    with use_implementation(implementation):
        no_rows = attend_rows(**{**inputs, "q": inputs["q"][:0], "query_positions": nothing})
        no_keys = attend_rows(**{**inputs, "keys": KeySlots.of(nothing, nothing)})
    assert no_rows.shape == (0, 6, 16)
    assert torch.equal(no_keys, torch.zeros_like(inputs["q"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_positions": torch.arange(3)}, "query_positions has shape"),
        ({"query_positions": torch.arange(21).int()}, "query_positions must be int64"),
        ({"q": torch.zeros(21, 5, 16)}, "5 query heads are not a multiple of 2 KV heads"),
        ({"q": torch.zeros(21, 6, 8)}, "k_pages has shape"),
        ({"q": torch.zeros(21, 6, 16).bfloat16()}, "q is torch.bfloat16"),
        ({"window": 0}, "window must be positive, got 0"),
        ({"softcap": -1.0}, "softcap must be positive"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, Any], message: str):
    inputs = ATTEND_ROWS.make_inputs(6)
    with pytest.raises(KernelArgumentError, match=message):
        attend_rows(**{**inputs, **change})


def test_refuses_an_unknown_reduction():
    inputs = {k: v for k, v in ATTEND_ROWS.make_inputs(7).items() if k != "v_pages"}
    with pytest.raises(KernelArgumentError, match="reduce must be"):
        column_mass(**inputs, reduce="max")  # type: ignore[arg-type]


def test_the_floor_counts_only_what_is_seen():
    inputs = ATTEND_ROWS.make_inputs(8, num_tokens=10, num_rows=1, window=4, head_dim=16)
    floor = ATTEND_ROWS.floor(inputs)
    assert floor.num_flops == 4 * 4 * 6 * 16
    assert floor.moved_bytes == 4 * (2 * 6 * 16 + 2 * 4 * 2 * 16)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("options", [{}, {"window": 24}, {"softcap": 5.0}], ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(
    num_kv_heads: int, options: dict[str, Any]
) -> None:
    """An entry is computed by a job on one machine's threads and again by a server on others."""
    before = torch.get_num_threads()
    try:
        for num_rows in (1, 2, 3, 4, 7, 16, 17, 31, 32, 33, 129):
            for num_before in (0, 7, 221):
                num_tokens = num_before + num_rows
                generator = torch.Generator().manual_seed(num_tokens)
                q, k, v = (
                    torch.randn(*shape, 16, generator=generator)
                    for shape in (
                        (num_rows, 2 * num_kv_heads),
                        (1, num_tokens, num_kv_heads),
                        (1, num_tokens, num_kv_heads),
                    )
                )
                slots = torch.arange(num_tokens)
                found = []
                for num_threads in (1, 2, 3):
                    torch.set_num_threads(num_threads)
                    keys = KeySlots.of(slots, slots)
                    rows = slots[num_before:]
                    found.append(attend_rows(q, k, v, keys, rows, scale=0.3, **options))
                assert torch.equal(found[0], found[1]), (num_rows, num_before)
                assert torch.equal(found[0], found[2]), (num_rows, num_before)
    finally:
        torch.set_num_threads(before)
