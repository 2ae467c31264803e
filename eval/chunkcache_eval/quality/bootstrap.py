"""Percentile bootstrap over questions, as counts of how often each question is drawn.

One matrix of draws serves every arm of a data set, which is what makes their intervals comparable.
This file knows numbers and gaps (NaN) only, neither arms nor metrics.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from chunkcache.errors import InvalidValueError

Floats: TypeAlias = npt.NDArray[np.float64]
Interval: TypeAlias = tuple[float, float]

_COVERED = 0.95
_MIN_DEFINED = 0.95
"""Share of resamples that must have a value before their percentiles mean anything."""


def draw_counts(num_questions: int, *, seed: int, resamples: int) -> Floats:
    """Draws ``num_questions`` questions with replacement, ``resamples`` times.

    Returns:
        Counts, ``[resamples, num_questions]``; each row sums to ``num_questions``. The same
        arguments give the same draws.

    Raises:
        InvalidValueError: If there is no resample to draw.
    """
    if resamples < 1:
        raise InvalidValueError(f"resamples must be at least 1, not {resamples}")
    shape = (resamples, num_questions)
    drawn = np.random.default_rng(seed).integers(0, max(num_questions, 1), shape)
    drawn += np.arange(resamples)[:, None] * num_questions
    counts = np.bincount(drawn.ravel(), minlength=resamples * num_questions)
    return counts.reshape(shape).astype(np.float64)


def resampled_means(values: Floats, counts: Floats) -> Floats:
    """Means of the known values of each resample.

    Args:
        values: One value per question, ``[questions]``; NaN where it isn't known.
        counts: What `draw_counts` gave, ``[resamples, questions]``.

    Returns:
        ``[resamples]``; NaN for a resample that drew no question with a known value.
    """
    known = ~np.isnan(values)
    sizes = counts @ known.astype(np.float64)
    sums = counts @ np.where(known, values, 0.0)
    return np.divide(sums, sizes, out=np.full_like(sums, np.nan), where=sizes > 0)


def percentile_interval(resampled: Floats) -> Interval | None:
    """The middle 95 % of resampled values.

    Returns:
        Its ends, or None where too many resamples have no value (NaN) to speak of percentiles.
    """
    defined = resampled[~np.isnan(resampled)]
    if defined.size == 0 or defined.size < _MIN_DEFINED * resampled.size:
        return None
    tail = (1 - _COVERED) / 2
    low, high = np.quantile(defined, [tail, 1 - tail])
    return float(low), float(high)
