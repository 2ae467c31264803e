"""Arms: what each name stands for, and what is refused before any work."""

import math

import pytest

from chunkcache.errors import InvalidValueError
from chunkcache.fusion.policies.registry import POLICY_NAMES, PolicyOptions, make_policy
from chunkcache_eval.quality.arms import METHODS, Arm, arms_for

PUBLISHED = {
    "full": "full",
    "none": "none",
    "random": "random(0.25, seed=0)",
    "cacheblend": "deviation(0.25, layer=1)",
    "cacheblend-as-shipped": "deviation(0.25, layer=1)",
    "prefix-cache": "full",
    "shift": "shift(0.25, layer=1, per=prompt)",
    "shift-per-chunk": "shift(0.25, layer=1, per=chunk)",
    "epic": "lego(4)",
    "infoflow": "query(0.25, layers=9-11, l2, chunk_floor=0)",
    "prophetkv": "query(0.25, layers=all, sum, chunk_floor=0)",
}


def _arm(name: str, ratio: float = 0.25) -> Arm:
    return next(a for a in arms_for([name], ["alone"], [ratio]) if a.name == name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_methods_are_settings_of_policies(name: str) -> None:
    arm = _arm(name)
    assert str(make_policy(arm.policy, arm.options_for(12), 0.9)) == PUBLISHED[name]
    assert arm.source


def test_every_policy_can_be_an_arm_with_its_own_defaults() -> None:
    for name in POLICY_NAMES:
        arm = _arm(name)
        expected = make_policy(name, PolicyOptions(), 0.25)
        assert make_policy(arm.policy, arm.options_for(2), 0.9) == expected


def test_a_variant_is_part_of_what_results_must_share() -> None:
    shipped, right = _arm("cacheblend-as-shipped"), _arm("cacheblend")
    assert shipped.options == right.options
    assert shipped.meaning == f"{right.meaning}, mask by row order"
    assert _arm("prefix-cache").meaning == "full, behind seen prefix"
    assert _arm("prefix-cache").ratio is None


def test_late_layers_are_the_last_quarter_and_at_least_one() -> None:
    arm = _arm("infoflow")
    assert [arm.options_for(n).layers for n in (1, 2, 8, 30)] == ["0-0", "1-1", "6-7", "23-29"]


def test_arms_are_a_product_with_the_bounds_in_front() -> None:
    arms = arms_for(
        ["hybrid", "epic", "hybrid", "none"], ["alone", "sink", "alone"], [0.1, 0.2, 0.1]
    )
    one = [("none", None), ("full", None), ("hybrid", 0.1), ("hybrid", 0.2), ("epic", None)]
    assert [(a.name, a.ratio, a.preparation) for a in arms] == [
        (name, ratio, preparation) for preparation in ("alone", "sink(4)") for name, ratio in one
    ]
    assert str(arms[2]) == "hybrid 0.1 alone"


def test_first_tokens_are_part_of_the_name() -> None:
    arm = _arm("epic(8)")
    assert arm.options.first_tokens == 8
    assert _arm("hybrid(2)").options == PolicyOptions(recompute_ratio=0.25, first_tokens=2)


@pytest.mark.parametrize(
    ("policies", "preparations", "ratios", "message"),
    [
        (["hibrid"], ["alone"], [0.1], "cacheblend-as-shipped, deviation, epic"),
        (["hybrid()"], ["alone"], [0.1], "unknown policy"),
        (["epic(-1)"], ["alone"], [0.1], "negative"),
        (["random(3)"], ["alone"], [0.1], "no parameter 'first_tokens'"),
        (["hybrid"], ["alon"], [0.1], "alone, sink"),
        (["hybrid"], ["alone"], [1.1], "not within 0 and 1"),
        (["none"], ["alone"], [-0.1], "not within 0 and 1"),
        (["hybrid"], ["alone"], [math.nan], "not within 0 and 1"),
        (["hybrid"], ["alone"], [], "needs a ratio"),
        ([], ["alone"], [0.1], "no policy"),
        (["none"], [], [0.1], "no preparation"),
    ],
)
def test_bad_input_is_refused(
    policies: list[str], preparations: list[str], ratios: list[float], message: str
) -> None:
    with pytest.raises(InvalidValueError) as caught:
        arms_for(policies, preparations, ratios)
    assert message in caught.value.message
    if "unknown policy" in caught.value.message:
        assert all(name in caught.value.message for name in METHODS)


def test_policies_without_a_ratio_need_none() -> None:
    assert [a.name for a in arms_for(["epic"], ["alone"], [])] == ["none", "full", "epic"]
