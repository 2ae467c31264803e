"""Policy ``shift``: rows that do not run move by the mean offset of those that do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LENGTHS = (40, 20, 30)


def _before_rope(bench: Any, k: torch.Tensor) -> torch.Tensor:
    """Keys ``[tokens, heads, dim]`` turned back, as complex numbers divided by their rotations."""
    tables = bench.runner.rotary.tables(len(k)).for_layer(0)
    half = k.shape[-1] // 2
    cos, sin = (t[:, None, :half].double() for t in tables)
    turned = torch.complex(k[..., :half].double(), k[..., half:].double())
    back = turned / torch.complex(cos, sin)
    return torch.cat([back.real, back.imag], dim=-1)


@pytest.mark.parametrize("per_chunk", [False, True])
@pytest.mark.parametrize("rope", [None, YARN])
def test_rows_that_stop_move_by_the_mean_offset_of_the_probes(
    bench_of: Callable[..., Any], rope: dict[str, Any] | None, per_chunk: bool
) -> None:
    """Layer 2 of three, where what comes in is still the same with and without the shift.

    1. Stale keys and values from ``none``, the probes' fresh ones from ``deviation``; keys turned
       back, means over the probes (of the row's chunk), added to the stale ones.
    2. The pages that ``shift`` leaves, keys turned back.
    """
    bench = bench_of("llama", num_hidden_layers=3, **({"rope_parameters": rope} if rope else {}))
    chunks = [bench.draw(n, i) for i, n in enumerate(LENGTHS)]
    stale = bench.run(bench.plan(chunks, "none"))
    fresh = bench.run(bench.plan(chunks, "deviation", recompute_ratio=0.2))
    moved = bench.run(bench.plan(chunks, "shift", recompute_ratio=0.2, per_chunk=per_chunk))
    segments = [range(s.start, s.end) for s in stale.layout.chunks]
    positions = torch.tensor([p for s in segments for p in s])
    is_probe = (fresh.v[2] != stale.v[2]).any(dim=2).any(dim=1)
    probes = [p for p in positions.tolist() if is_probe[p]]
    assert len(probes) == 18
    for group in segments if per_chunk else [positions.tolist()]:
        of_group = [p for p in group if is_probe[p]]
        rest = [p for p in group if not is_probe[p]]
        assert of_group
        for before, run, after in (
            (stale.v[2].double(), fresh.v[2].double(), moved.v[2].double()),
            tuple(_before_rope(bench, r.k[2]) for r in (stale, fresh, moved)),
        ):
            offset = (run[of_group] - before[of_group]).mean(dim=0)
            assert offset.abs().max() > 1e-3
            assert (after[rest] - before[rest] - offset).abs().max() <= 1e-5
            assert torch.equal(after[of_group], run[of_group]), "probes keep their fresh rows"
    assert torch.equal(moved.v[:2], fresh.v[:2]), "the check layer is fresh everywhere"


def test_a_chunk_without_probes_stays_where_each_has_its_own_mean(
    bench_of: Callable[..., Any],
) -> None:
    bench = bench_of("llama", num_hidden_layers=3)
    chunks = [bench.draw(40, 1), bench.draw(40, 2)]
    stale = bench.run(bench.plan(chunks, "none"))
    for per_chunk in (False, True):
        moved = bench.run(bench.plan(chunks, "shift", recompute_ratio=1 / 80, per_chunk=per_chunk))
        changed = [
            bool((moved.v[2] != stale.v[2])[s.start : s.end].any()) for s in stale.layout.chunks
        ]
        assert sum(changed) == (1 if per_chunk else 2)
        assert bool(torch.isfinite(moved.v).all())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_shift_costs_what_deviation_does_and_counts_the_same(
    bench_of: Callable[..., Any], family: str
) -> None:
    bench = bench_of(family, num_hidden_layers=3)
    chunks = [bench.draw(n, i) for i, n in enumerate(LENGTHS)]
    bench.run(bench.plan(chunks, "none"))
    one, other = (
        bench.run(bench.plan(chunks, name, recompute_ratio=0.2)).outcome
        for name in ("deviation", "shift")
    )
    assert one.report.account == other.report.account
    assert one.report.charged_ratio == other.report.charged_ratio
    assert (one.logits - other.logits).abs().max() > 1e-3


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_at_its_ends_there_is_nothing_to_move(bench_of: Callable[..., Any], ratio: float) -> None:
    bench = bench_of("llama", num_hidden_layers=3)
    chunks = [bench.draw(n, i) for i, n in enumerate(LENGTHS)]
    one, other = (
        bench.run(bench.plan(chunks, name, recompute_ratio=ratio))
        for name in ("deviation", "shift")
    )
    assert torch.equal(one.outcome.logits, other.outcome.logits)


def test_entries_stay_as_they_are(bench_of: Callable[..., Any]) -> None:
    """The move is made in the request's own pages."""
    bench = bench_of("llama", num_hidden_layers=3)
    chunks = [bench.draw(n, i) for i, n in enumerate(LENGTHS)]
    before = bench.run(bench.plan(chunks, "none"))
    bench.run(bench.plan(chunks, "shift", recompute_ratio=0.2))
    after = bench.run(bench.plan(chunks, "none"))
    assert torch.equal(before.k, after.k)
    assert torch.equal(before.v, after.v)
