"""What was served, counted once."""

from collections.abc import Callable
from typing import Any

import pytest

from chunkcache import AskOptions
from chunkcache.errors import QueueFullError
from chunkcache.serving_meter import Histogram, ServingMeter

QUESTION = "Who keeps the key?"


def test_a_histogram_counts_a_bound_in_its_own_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    found = histogram.counts()
    assert (found.counts, found.total, found.num_values) == ((2, 2, 1), 8.0, 5)


def test_every_answer_is_counted_as_its_report_says(
    open_cache: Callable[..., Any], passages: dict[str, str]
) -> None:
    cache = open_cache(min_fused_context_tokens=40)
    for name, text in passages.items():
        cache.put(name, text)
    answers = [
        cache.answer(QUESTION, names, max_tokens=n, compare=n == 5)
        for names, n in ((list(passages), 5), (["tower"], 3), ([], 4))
    ]
    stats = cache.runtime.meter.stats()
    accounts = [a.report.account for a in answers]
    assert stats.outcomes == {"length": 3}, "the verification's own runs are not served"
    assert sum(stats.prompt_tokens.values()) == sum(a.prompt_tokens for a in accounts)
    assert stats.exact_prefix_tokens == sum(a.exact_prefix_tokens for a in accounts)
    assert stats.fused_tokens == sum(a.fused_tokens for a in accounts) > 0
    assert stats.answer_tokens == 12
    assert stats.fallbacks == {}
    timings = [a.report.timings for a in answers]
    assert stats.seconds["first_token"].num_values == 3
    assert stats.seconds["first_token"].total == pytest.approx(
        sum(t.ttft_ms for t in timings) / 1e3
    )
    assert stats.seconds["inter_token"].num_values == 12 - 3
    assert 0 < stats.seconds["inter_token"].total <= stats.seconds["decode"].total


def test_fallbacks_failures_and_refusals_are_counted_by_reason(
    open_cache: Callable[..., Any], passages: dict[str, str]
) -> None:
    cache = open_cache(min_fused_context_tokens=4000)
    cache.put("tower", passages["tower"])
    cache.answer(QUESTION, ["tower"], max_tokens=1)
    with cache.stream(QUESTION, ["tower"], AskOptions(max_tokens=200)) as growing:
        next(iter(growing))
    cache.answer(QUESTION, ["tower"], max_tokens=1)
    stats = cache.runtime.meter.stats()
    assert stats.fallbacks == {"context_too_short": 2}
    assert stats.outcomes == {"length": 2, "request_cancelled": 1}
    meter = ServingMeter()
    meter.record(QueueFullError("full"))
    meter.record(RuntimeError("a fault"))
    assert meter.stats().outcomes == {"queue_full": 1, "internal_error": 1}
