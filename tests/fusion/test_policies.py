"""Each policy's choice, by hand, on candidates with a made-up signal."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkcache.errors import InvalidValueError
from chunkcache.fusion.policies.registry import POLICY_NAMES, PolicyOptions, make_policy
from chunkcache.fusion.policy import (
    Candidates,
    Narrowing,
    resolve_layers,
    rows_of_ratio,
    top,
    top_of_chunks,
)


@dataclass
class _Signal:
    scores: list[float]
    asked: list[tuple[tuple[int, ...], str]] = field(default_factory=list)

    def __call__(self, layers: tuple[int, ...], aggregation: str) -> torch.Tensor:
        self.asked.append((layers, aggregation))
        return torch.tensor(self.scores)


def _candidates(lengths: list[int], signal: _Signal) -> Candidates:
    chunk_of = [i for i, n in enumerate(lengths) for _ in range(n)]
    offsets = [o for n in lengths for o in range(n)]
    return Candidates(
        positions=torch.arange(10, 10 + len(chunk_of)),
        chunk_of=torch.tensor(chunk_of, dtype=torch.int64),
        offset_in_chunk=torch.tensor(offsets, dtype=torch.int64),
        num_layers=6,
        query_attention=signal,
    )


def _chosen(name: str, candidates: Candidates, **options: object) -> list[int]:
    policy = make_policy(name, PolicyOptions(**options), 0.5)  # type: ignore[arg-type]
    return torch.nonzero(policy.select(candidates).chosen).flatten().tolist()


def test_lego_takes_the_first_tokens_of_every_chunk() -> None:
    signal = _Signal([0.0] * 9)
    assert _chosen("lego", _candidates([5, 1, 3], signal), first_tokens=2) == [0, 1, 5, 6, 7]
    assert not signal.asked


def test_query_takes_the_top_of_its_signal() -> None:
    signal = _Signal([0.1, 0.9, 0.3, 0.8, 0.2, 0.5])
    assert _chosen("query", _candidates([3, 3], signal), layers="last", aggregation="l2") == [
        1,
        3,
        5,
    ]
    assert signal.asked == [((5,), "l2")]


@pytest.mark.parametrize("name", ["query", "hybrid"])
@pytest.mark.parametrize(("ratio", "chosen"), [(0.0, []), (1.0, [0, 1, 2, 3])])
def test_the_ends_need_no_probe(name: str, ratio: float, chosen: list[int]) -> None:
    signal = _Signal([1.0, 2.0, 3.0, 4.0])
    assert _chosen(name, _candidates([2, 2], signal), recompute_ratio=ratio) == chosen
    assert not signal.asked


def test_hybrid_fills_the_budget_behind_the_first_tokens() -> None:
    signal = _Signal([0.0, 0.1, 0.9, 0.2, 0.0, 0.8, 0.7, 0.3])
    candidates = _candidates([4, 4], signal)
    assert _chosen("hybrid", candidates, first_tokens=1, layers="late") == [0, 2, 4, 5]
    assert signal.asked == [((4, 5), "sum")]


def test_a_floor_gives_every_chunk_its_share() -> None:
    """Of 6 rows each chunk of 4 gets 2 * 0.5; the rest go where the attention is."""
    signal = _Signal([0.1, 0.2, 0.0, 0.0, 0.3, 0.1, 0.0, 0.0, 0.9, 0.8, 0.7, 0.6])
    candidates = _candidates([4, 4, 4], signal)
    assert _chosen("query", candidates, chunk_floor=0.0) == [1, 4, 8, 9, 10, 11]
    assert _chosen("query", candidates, chunk_floor=1.0) == [0, 1, 4, 5, 8, 9]
    assert _chosen("query", candidates, recompute_ratio=0.25, chunk_floor=0.0) == [8, 9, 10]
    assert _chosen("query", candidates, recompute_ratio=0.25, chunk_floor=1.0) == [1, 4, 8]
    assert _chosen("hybrid", candidates, first_tokens=1, chunk_floor=0.5) == [0, 4, 8, 9, 10, 11]


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    ratio=st.floats(0, 1),
    floor=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_floors_are_met_within_the_budget(
    lengths: list[int], ratio: float, floor: float, seed: int
) -> None:
    """1. As many rows as asked for. 2. Each chunk has its floor. 3. Above the floors it is a top."""
    chunk_of = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)])
    scores = torch.randperm(len(chunk_of), generator=torch.Generator().manual_seed(seed)).float()
    num_rows = rows_of_ratio(ratio, len(scores))
    chosen = top_of_chunks(scores, chunk_of, num_rows, ratio * floor)
    assert int(chosen.sum()) == num_rows
    spare = []
    for index, length in enumerate(lengths):
        own = chunk_of == index
        least = int(length * ratio * floor - 1e-5)
        assert int((chosen & own).sum()) >= least
        kept = scores[own & chosen].sort(descending=True).values
        spare += kept[int(length * ratio * floor + 1e-5) :].tolist()
        left = scores[own & ~chosen]
        assert not len(left) or not len(kept) or left.max() < kept.min()
    if spare and not bool(chosen.all()):
        assert min(spare) > scores[~chosen].max()


def test_a_small_budget_takes_first_tokens_chunk_by_chunk() -> None:
    signal = _Signal([9.0] * 12)
    candidates = _candidates([4, 4, 4], signal)
    assert _chosen("hybrid", candidates, recompute_ratio=0.25, first_tokens=2) == [0, 4, 8]
    assert _chosen("hybrid", candidates, recompute_ratio=0.34, first_tokens=2) == [0, 1, 4, 8]
    assert not signal.asked


def test_deviation_narrows_later() -> None:
    candidates = _candidates([4, 4], _Signal([]))
    policy = make_policy("deviation", PolicyOptions(recompute_ratio=0.25), 0.5)
    selection = policy.select(candidates)
    assert bool(selection.chosen.all())
    assert selection.narrowing == Narrowing(1, 2)
    with pytest.raises(InvalidValueError):
        Narrowing(0, 2)


def test_random_is_a_function_of_its_seed() -> None:
    candidates = _candidates([20], _Signal([]))
    draws = [_chosen("random", candidates, seed=s) for s in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert len(draws[0]) == 10


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30), st.data())
def test_top_takes_the_highest_and_breaks_ties_by_position(
    scores: list[float], data: st.DataObject
) -> None:
    n = data.draw(st.integers(0, len(scores)))
    values = torch.tensor(scores)
    chosen = torch.nonzero(top(values, n)).flatten().tolist()
    expected = sorted(sorted(range(len(scores)), key=lambda i: (-float(values[i]), i))[:n])
    assert chosen == expected


@given(st.floats(0, 1), st.integers(0, 10_000))
def test_rounding_keeps_the_ends(ratio: float, n: int) -> None:
    rows = rows_of_ratio(ratio, n)
    assert 0 <= rows <= n
    assert abs(rows - ratio * n) <= 0.5
    assert rows_of_ratio(0.0, n) == 0
    assert rows_of_ratio(1.0, n) == n


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", (0, 1, 2, 3, 4, 5)),
        ("upper", (3, 4)),
        ("late", (4, 5)),
        ("last", (5,)),
        ("2-4", (2, 3, 4)),
    ],
)
def test_layers_by_name(layers: str, expected: tuple[int, ...]) -> None:
    assert resolve_layers(layers, 6) == expected


@pytest.mark.parametrize("layers", ["first", "4-2", "3-6", "-1", "1-", ""])
def test_layers_that_are_not_there_are_refused(layers: str) -> None:
    with pytest.raises(InvalidValueError):
        resolve_layers(layers, 6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cacheblend", {}),
        ("full", {"recompute_ratio": 0.1}),
        ("none", {"layers": "all"}),
        ("lego", {"recompute_ratio": 0.1}),
        ("lego", {"first_tokens": -1}),
        ("query", {"recompute_ratio": 1.1}),
        ("query", {"recompute_ratio": float("nan")}),
        ("query", {"aggregation": "max"}),
        ("query", {"chunk_floor": 1.5}),
        ("hybrid", {"chunk_floor": -0.1}),
        ("lego", {"chunk_floor": 0.5}),
        ("hybrid", {"aggregation": "sum"}),
        ("hybrid", {"first_tokens": -2}),
        ("shift", {"recompute_ratio": -0.1}),
        ("shift", {"layers": "all"}),
        ("deviation", {"per_chunk": True}),
    ],
)
def test_bad_policies_are_refused(name: str, options: dict[str, object]) -> None:
    with pytest.raises(InvalidValueError):
        make_policy(name, PolicyOptions(**options), 0.15)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_says_what_it_is(name: str) -> None:
    policy = make_policy(name, PolicyOptions(), 0.15)
    assert str(policy).startswith(name)
    assert policy.is_exact == (name == "full")
