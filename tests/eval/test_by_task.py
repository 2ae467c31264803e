"""Tasks held apart: each arm's summary on each, and what a reader sees of them."""

from typing import Any

import pytest

from chunkcache_eval.quality.by_task import TaskBreakdown, arms_with_tasks
from chunkcache_eval.quality.outcome import Outcome
from chunkcache_eval.quality.summary import summarise
from chunkcache_eval.quality.table import print_summaries


def _outcome(question_id: str, task: str, mean_kl: float, **changes: Any) -> Outcome:
    values: dict[str, Any] = {
        "data": "synth",
        "policy": "hybrid",
        "preparation": "alone",
        "ratio": 0.1,
        "charged_ratio": 0.12,
        "prompt_tokens": 1000,
        "kl_first": 0.0,
        "agreement": 0.5,
        "f1": 0.4,
        "exact_match": 0.0,
        "contains": 1.0,
        "full_f1": 0.6,
        "none_f1": 0.2,
        "ttft_ms": 100.0,
        "full_ttft_ms": 1000.0,
        "answer": "a",
        "full_answer": "b",
    }
    return Outcome(question_id=question_id, task=task, mean_kl=mean_kl, **(values | changes))


MIXED = [
    _outcome("q1", "chain2", 0.5),
    _outcome("q2", "chain2", 0.7, f1=0.0),
    _outcome("q3", "niah_single", 0.0),
    _outcome("q1", "chain2", 0.1, policy="full", ratio=None),
]


def test_a_task_is_not_averaged_away() -> None:
    full, hybrid = arms_with_tasks(summarise(MIXED), TaskBreakdown.of(MIXED))
    assert hybrid["mean_kl"] == pytest.approx(0.4)
    tasks = hybrid["tasks"]
    assert [(t["task"], t["n"], t["policy"], t["ratio"]) for t in tasks] == [
        ("chain2", 2, "hybrid", 0.1),
        ("niah_single", 1, "hybrid", 0.1),
    ]
    assert [t["mean_kl"] for t in tasks] == pytest.approx([0.6, 0.0])
    assert [t["f1"] for t in tasks] == pytest.approx([0.2, 0.4])
    (only,) = full["tasks"]
    assert only["task"] == "chain2", "no row for a task that the arm has no outcome of"


def test_records_without_tasks_have_no_breakdown() -> None:
    outcomes = [_outcome("q1", "", 0.5), _outcome("q2", "", 0.7)]
    breakdown = TaskBreakdown.of(outcomes)
    assert arms_with_tasks(summarise(outcomes), breakdown)[0]["tasks"] == []
    assert not breakdown.has_several("synth")


def test_the_table_shows_tasks_where_there_are_several(capsys: pytest.CaptureFixture[str]) -> None:
    other = [_outcome("q1", "one", 0.5, data="plain")]
    outcomes = [*MIXED, *other]
    print_summaries(summarise(outcomes), TaskBreakdown.of(outcomes))
    printed = capsys.readouterr().out
    assert "synth by task" in printed
    assert "0.6000, 0.20 (2)" in printed
    assert "plain by task" not in printed


def test_names_that_look_like_markup_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [_outcome("q1", "[/b]", 0.5), _outcome("q2", "[red]x:cat:", 0.5)]
    print_summaries(summarise(outcomes), TaskBreakdown.of(outcomes))
    printed = capsys.readouterr().out
    assert "[/b]" in printed
    assert "[red]x:cat:" in printed
