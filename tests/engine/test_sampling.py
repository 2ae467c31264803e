"""Drawing tokens: greedy, seeded, truncated as asked."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkcache.engine.sampling import Sampler, SamplingParams
from chunkcache.errors import InvalidValueError

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.0])


def _draws(params: SamplingParams, n: int = 200) -> list[int]:
    sampler = Sampler(params)
    return [sampler.draw(LOGITS) for _ in range(n)]


def test_greedy_takes_the_largest() -> None:
    assert set(_draws(SamplingParams(), 3)) == {1}


def test_a_seed_fixes_every_draw() -> None:
    a, b, c = (_draws(SamplingParams(temperature=1.0, seed=s)) for s in (1, 1, 2))
    assert a == b
    assert a != c


@given(st.integers(1, 5), st.integers(-(2**63), 2**63 - 1))
def test_top_k_draws_only_from_the_top(k: int, seed: int) -> None:
    allowed = set(LOGITS.argsort(descending=True)[:k].tolist())
    assert set(_draws(SamplingParams(temperature=2.0, top_k=k, seed=seed), 20)) <= allowed


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probabilities = torch.softmax(LOGITS, 0)
    just_two = float(probabilities[1]) + 0.001
    assert set(_draws(SamplingParams(temperature=1.0, top_p=just_two))) == {1, 2}
    assert set(_draws(SamplingParams(temperature=1.0, top_p=0.01))) == {1}


def test_draws_follow_the_distribution() -> None:
    draws = torch.tensor(_draws(SamplingParams(temperature=1.0, seed=7), 4000))
    shares = torch.bincount(draws, minlength=5) / len(draws)
    assert (shares - torch.softmax(LOGITS, 0)).abs().max() < 0.03


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", 0),
        ("seed", 2**63),
    ],
)
def test_values_out_of_range_name_their_field(field: str, value: float) -> None:
    with pytest.raises(InvalidValueError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field
