"""Scores against values worked out by hand."""

import pytest

from chunkcache_eval.quality.metrics import (
    AnswerScore,
    contains,
    exact_match,
    normalise,
    score_answer,
    token_f1,
)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Eiffel-Tower!", "eiffeltower"),
        ("an apple, a day", "apple day"),
        ("Anna's theatre", "annas theatre"),
        (" \n", ""),
    ],
)
def test_normal_form(text: str, normal: str) -> None:
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("answer", "gold", "f1"),
    [
        ("the red fox", "Red fox.", 1.0),
        ("red fox jumps high", "the fox", 2 * (1 / 4) * 1 / (1 / 4 + 1)),
        ("fox fox", "fox", 2 * (1 / 2) * 1 / (1 / 2 + 1)),
        ("wolf", "fox", 0.0),
        ("", "fox", 0.0),
        ("", "the", 1.0),
    ],
)
def test_token_f1(answer: str, gold: str, f1: float) -> None:
    assert token_f1(answer, gold) == pytest.approx(f1)


def test_containment_is_of_whole_words_in_a_row() -> None:
    assert contains("It was built in 1902, they say.", "built in 1902")
    assert not contains("room 14", "4")
    assert not contains("1902 was when it was built", "built 1902")
    assert not contains("anything", "the")
    assert contains("a", "the")


def test_exact_match() -> None:
    assert exact_match("The baker.", "baker")
    assert not exact_match("The old baker", "baker")


def _values(score: AnswerScore | None) -> tuple[float, float, float]:
    assert score is not None
    return score.f1, score.exact_match, score.contains


def test_any_gold_answer_will_do() -> None:
    score = score_answer("the old baker", ["Miller", "baker"])
    assert _values(score) == pytest.approx((2 / 3, 0.0, 1.0))


def test_all_gold_answers_are_needed() -> None:
    golds = ["111", "222", "333", "444"]
    half = score_answer("111 and 333", golds, needs_all=True)
    assert _values(half) == pytest.approx(((0.5 + 0 + 0.5 + 0) / 4, 0.0, 0.5))
    exact = score_answer("444, 333, 222, 111", golds, needs_all=True)
    assert _values(exact) == pytest.approx((0.4, 1.0, 1.0))


def test_without_gold_answers_there_is_no_score() -> None:
    assert score_answer("anything", []) is None
