"""Reciprocal rank fusion: its formula, and what it does with ties and gaps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkcache_retriever.rank_fusion import reciprocal_rank_fusion


def test_the_formula() -> None:
    fused = dict(reciprocal_rank_fusion([["a", "b"], ["b", "c"]], k=60))
    assert fused == pytest.approx({"a": 1 / 61, "b": 1 / 62 + 1 / 61, "c": 1 / 62})


def test_what_both_find_comes_first_and_ties_keep_the_first_ranking_s_order() -> None:
    fused = reciprocal_rank_fusion([["a", "b"], ["c", "b"]])
    assert [item for item, _ in fused] == ["b", "a", "c"]


def test_weights_and_empty_rankings() -> None:
    assert reciprocal_rank_fusion([[], []]) == []
    fused = reciprocal_rank_fusion([["a"], ["b"]], weights=[1.0, 2.0])
    assert [item for item, _ in fused] == ["b", "a"]
    with pytest.raises(ValueError, match="argument"):
        reciprocal_rank_fusion([["a"]], weights=[1.0, 2.0])


@given(st.permutations(range(6)), st.permutations(range(6)))
def test_what_is_nowhere_behind_is_not_behind_in_the_end(first, second) -> None:
    order = [item for item, _ in reciprocal_rank_fusion([first, second])]
    assert sorted(order) == list(range(6))
    for a in range(6):
        for b in range(6):
            if first.index(a) < first.index(b) and second.index(a) < second.index(b):
                assert order.index(a) < order.index(b)
