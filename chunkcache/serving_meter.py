"""What was served, counted: tokens by source, outcomes, fallbacks, distributions of times.

Told of every answer's end by the front door, on the engine's thread; read by whoever shows it.
Knows no form of export.
"""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from chunkcache.engine.stream import Finished
from chunkcache.errors import ChunkCacheError
from chunkcache.results import FusionReport, Timings

Stage = Literal["queue", "load", "fuse", "first_token", "inter_token", "decode"]
"""What is timed: waiting; loading entries, missing ones prefilled; placing, probing and
recomputing; from submission to the first token; from a token to the next; from the first token to
the last."""

SECONDS_BOUNDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


@dataclass(frozen=True)
class HistogramCounts:
    """A snapshot of a histogram.

    Attributes:
        bounds: Upper bounds of the buckets, ascending; a value equal to one is in its bucket.
        counts: Values per bucket, and beyond the last bound: one more than there are bounds.
        total: Sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def num_values(self) -> int:
        """How many values were observed."""
        return sum(self.counts)


class Histogram:
    """Counts values by bucket. Not locked: its owner serialises the calls.

    Args:
        bounds: Upper bounds of the buckets, ascending.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        assert list(bounds) == sorted(set(bounds)), bounds
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def counts(self) -> HistogramCounts:
        """A snapshot."""
        return HistogramCounts(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True)
class ServingStats:
    """A snapshot of what was served since the start.

    Attributes:
        outcomes: Requests ended, by finish reason or error code.
        prompt_tokens: Prompt tokens, by tier, or ``recomputed`` or ``computed``.
        exact_prefix_tokens: Reused prompt tokens that equal a full prefill's.
        fused_tokens: Reused prompt tokens that were placed and not run.
        answer_tokens: Tokens of the answers.
        fallbacks: Warnings in answers' reports, by their code.
        seconds: Distribution of times by stage.
    """

    outcomes: Mapping[str, int]
    prompt_tokens: Mapping[str, int]
    exact_prefix_tokens: int
    fused_tokens: int
    answer_tokens: int
    fallbacks: Mapping[str, int]
    seconds: Mapping[Stage, HistogramCounts]


class ServingMeter:
    """Counts what is served. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes: Counter[str] = Counter()
        self._prompt_tokens: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter()
        self._exact_prefix_tokens = self._fused_tokens = self._answer_tokens = 0
        self._seconds: dict[Stage, Histogram] = {
            "queue": Histogram(SECONDS_BOUNDS),
            "load": Histogram(SECONDS_BOUNDS),
            "fuse": Histogram(SECONDS_BOUNDS),
            "first_token": Histogram(SECONDS_BOUNDS),
            "inter_token": Histogram(SECONDS_BOUNDS),
            "decode": Histogram(SECONDS_BOUNDS),
        }

    def record(self, end: Finished | BaseException) -> None:
        """Count an answer's end, or a request's refusal.

        The prompt, and the request itself, count with the first of its answers.
        """
        with self._lock:
            if isinstance(end, Finished):
                self._record_answer(end)
                if end.index == 0:
                    self._outcomes[end.finish_reason] += 1
                    self._record_prompt(end.report)
            else:
                is_ours = isinstance(end, ChunkCacheError)
                self._outcomes[end.code if is_ours else ChunkCacheError.code] += 1

    def stats(self) -> ServingStats:
        """A consistent snapshot."""
        with self._lock:
            return ServingStats(
                outcomes=dict(self._outcomes),
                prompt_tokens=dict(self._prompt_tokens),
                exact_prefix_tokens=self._exact_prefix_tokens,
                fused_tokens=self._fused_tokens,
                answer_tokens=self._answer_tokens,
                fallbacks=dict(self._fallbacks),
                seconds={stage: h.counts() for stage, h in self._seconds.items()},
            )

    def _record_answer(self, finished: Finished) -> None:
        self._answer_tokens += len(finished.token_ids)
        for gap_ms in finished.gaps_ms:
            self._seconds["inter_token"].observe(gap_ms / 1e3)

    def _record_prompt(self, report: FusionReport) -> None:
        self._prompt_tokens.update(report.account.by_source())
        self._exact_prefix_tokens += report.account.exact_prefix_tokens
        self._fused_tokens += report.account.fused_tokens
        self._fallbacks.update(warning.code for warning in report.warnings)
        for stage, spent_ms in _stages_ms(report.timings).items():
            self._seconds[stage].observe(spent_ms / 1e3)


def _stages_ms(timings: Timings) -> dict[Stage, float]:
    return {
        "queue": timings.queue_ms,
        "load": timings.load_ms,
        "fuse": timings.place_ms + timings.probe_ms + timings.recompute_ms,
        "first_token": timings.ttft_ms,
        "decode": timings.decode_ms,
    }
