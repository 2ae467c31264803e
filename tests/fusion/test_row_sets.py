"""Every policy's row set obeys its definition, whatever the prompt and the signal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkcache.fusion.cost import CostMeter
from chunkcache.fusion.policies.auto import Auto
from chunkcache.fusion.policies.auto_table import AutoRatio, AutoTable
from chunkcache.fusion.policies.registry import POLICY_NAMES, PolicyOptions, make_policy
from chunkcache.fusion.policy import Candidates, Policy, rows_of_ratio
from chunkcache.fusion.recompute import LayerRows, SequenceKV, finish_rows, run_rows

NUM_LAYERS = 6
WITH_RATIO = tuple(
    name for name in POLICY_NAMES if make_policy(name, PolicyOptions(), 0.5).nominal_ratio
)
LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def _candidates(lengths: list[int], scores: list[float]) -> Candidates:
    return Candidates(
        positions=torch.arange(10, 10 + sum(lengths)),
        chunk_of=torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)]),
        offset_in_chunk=torch.tensor([o for n in lengths for o in range(n)]),
        num_layers=NUM_LAYERS,
        query_attention=lambda layers, how: torch.tensor(scores),
    )


_AUTO = Auto(0.02).with_table(
    AutoTable(
        model_name="",
        preparation="",
        codec="",
        fingerprint="",
        num_questions=0,
        num_context_tokens=0,
        choices=(AutoRatio(0.2, (1.0, 0.0)), AutoRatio(0.5, (-9.0, 0.0))),
        margin=0.0,
    )
)
"""Takes its first ratio for too far off, its second for close enough."""


def _policy(name: str, ratio: float) -> Policy:
    return _AUTO if name == "auto" else make_policy(name, PolicyOptions(), ratio)


@st.composite
def _prompts(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    """Chunk lengths, and a signal with many ties."""
    lengths = draw(LENGTHS)
    size = sum(lengths)
    values = st.sampled_from([0.0, 0.25, 0.5, 1.0])
    return lengths, draw(st.lists(values, min_size=size, max_size=size))


def test_policies_with_a_ratio_are_known() -> None:
    assert set(POLICY_NAMES) - set(WITH_RATIO) == {"full", "none", "lego", "auto"}


@given(prompt=_prompts(), ratio=st.floats(0, 1), name=st.sampled_from(POLICY_NAMES))
def test_the_set_is_of_candidates_of_the_size_asked_for_and_stable(
    prompt: tuple[list[int], list[float]], ratio: float, name: str
) -> None:
    """1. One flag per candidate. 2. The budget, to the row. 3. The same again, and by clone."""
    lengths, scores = prompt
    selection = _policy(name, ratio).select(_candidates(lengths, scores))
    chosen, narrowing = selection.chosen, selection.narrowing
    size = sum(lengths)
    assert chosen.shape == (size,)
    assert chosen.dtype == torch.bool
    kept = int(chosen.sum()) if narrowing is None else narrowing.num_rows
    if name in WITH_RATIO:
        assert kept == rows_of_ratio(ratio, size)
    if name == "auto":
        assert kept == rows_of_ratio(0.5, size)
    assert kept <= int(chosen.sum()) <= size
    if narrowing is not None:
        assert name in ("deviation", "shift")
        assert 1 <= narrowing.layer < NUM_LAYERS
        assert 0 < narrowing.num_rows < size
        assert (narrowing.shift is not None) == (name == "shift")
    again = _policy(name, ratio).select(_candidates(lengths, list(scores)))
    assert torch.equal(chosen, again.chosen)
    assert narrowing == again.narrowing


@given(lengths=LENGTHS, num_tokens=st.integers(0, 14))
def test_lego_is_never_above_its_tokens_per_chunk(lengths: list[int], num_tokens: int) -> None:
    policy = make_policy("lego", PolicyOptions(first_tokens=num_tokens), 0.5)
    candidates = _candidates(lengths, [])
    chosen = policy.select(candidates).chosen
    for index, length in enumerate(lengths):
        own = chosen[candidates.chunk_of == index]
        assert own.tolist() == [o < num_tokens for o in range(length)]


@given(prompt=_prompts(), ratio=st.floats(0, 1), first=st.integers(0, 4))
def test_hybrid_prefers_first_tokens_within_its_budget(
    prompt: tuple[list[int], list[float]], ratio: float, first: int
) -> None:
    """All of them where they fit; else none at a later offset while an earlier one is left."""
    lengths, scores = prompt
    candidates = _candidates(lengths, scores)
    policy = make_policy("hybrid", PolicyOptions(first_tokens=first), ratio)
    chosen = policy.select(candidates).chosen
    offsets = candidates.offset_in_chunk
    is_first = offsets < first
    if int(is_first.sum()) <= int(chosen.sum()):
        assert bool(chosen[is_first].all())
    elif bool(chosen.any()):
        assert bool(is_first[chosen].all())
        assert int(offsets[chosen].max()) <= int(offsets[is_first & ~chosen].min())


@pytest.mark.parametrize("name", ["query", "hybrid"])
@given(lengths=LENGTHS, ratio=st.floats(0, 1))
def test_ties_go_to_the_lower_position(name: str, lengths: list[int], ratio: float) -> None:
    """With one score for all, each chunk's chosen rows are its first ones, and without floors
    they are the prompt's first ones."""
    candidates = _candidates(lengths, [1.0] * sum(lengths))
    chosen = _policy(name, ratio).select(candidates).chosen
    for index in range(len(lengths)):
        own = chosen[candidates.chunk_of == index].tolist()
        assert own == sorted(own, reverse=True)
    options = PolicyOptions(chunk_floor=0.0, first_tokens=0 if name == "hybrid" else None)
    flat = make_policy(name, options, ratio).select(candidates).chosen.tolist()
    assert flat == sorted(flat, reverse=True)


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(POLICY_NAMES),
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=4),
    ratio=st.floats(0, 1),
    question=st.integers(0, 5),
)
def test_fixed_rows_always_run_and_candidates_stay_within_the_budget(
    bench_of: Callable[..., Any], name: str, lengths: list[int], ratio: float, question: int
) -> None:
    """What ran is read off the pages: a row that ran left its fresh values at the last layer.

    1. Stale values from ``none``, whose fixed rows ran.
    2. Values after the policy: chunk rows that differ, at most the budget where nothing moves
       rows; template and question rows are written, whatever the policy.
    """
    bench = bench_of("llama", num_hidden_layers=3)
    chunks = [bench.draw(n, i) for i, n in enumerate(lengths)]
    options = {"recompute_ratio": ratio} if name in WITH_RATIO else {}
    asked = bench.draw(question, 99)
    stale = bench.run(bench.plan(chunks, "none", question=asked))
    policy = _AUTO if name == "auto" else name
    run = bench.run(bench.plan(chunks, policy, question=asked, **options))
    assert bool(torch.isfinite(run.v).all()), "the pool holds NaN where nothing was written"
    positions = [p for s in run.layout.chunks for p in range(s.start, s.end)]
    changed = (run.v[-1] != stale.v[-1]).any(dim=2).any(dim=1)
    num_changed = int(changed[positions].sum())
    counted = sum(d.recomputed_tokens for d in run.outcome.report.documents)
    if name in WITH_RATIO:
        assert counted == rows_of_ratio(ratio, len(positions))
    if name != "shift":
        assert num_changed <= counted


@torch.inference_mode()
def test_a_row_set_never_grows_from_layer_to_layer(bench_of: Callable[..., Any]) -> None:
    """The executor refuses nothing else: rows that a hook drops never come back."""
    bench = bench_of("llama", num_hidden_layers=3)
    ids = torch.tensor(bench.draw(20, 1))
    pages = bench.pool.allocate(20)
    seen: list[set[int]] = []

    def halve(layer_rows: LayerRows) -> torch.Tensor:
        seen.append(set(layer_rows.rows.tolist()))
        return torch.arange(1, len(layer_rows.rows), 2)

    with pages:
        sequence = SequenceKV.over(bench.runner, bench.pool.k, bench.pool.v, pages.slots)
        every = torch.arange(20)
        cost = CostMeter(3)
        last = finish_rows(run_rows(bench.runner, sequence, ids, every, cost=cost, hook=halve))
    assert seen[0] >= seen[1] >= seen[2] >= set(last.rows.tolist())
    assert [len(rows) for rows in seen] == [20, 10, 5]
    assert cost.row_layers == 35
