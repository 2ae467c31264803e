"""How far a run is: bytes done, and an estimate of the rest."""

import pytest

from chunkcache.precache import PrecacheProgress, TextItem
from chunkcache_api.cli.precache_display import duration
from chunkcache_api.cli.precache_meter import PrecacheMeter, SizedItem


def progress(prefilled_tokens: int, tokens_per_second: float) -> PrecacheProgress:
    return PrecacheProgress(
        item="a",
        documents=0,
        prefilled_chunks=0,
        prefilled_tokens=prefilled_tokens,
        tokens_per_second=tokens_per_second,
        failures=0,
    )


def meter_of(*num_bytes: int) -> PrecacheMeter:
    return PrecacheMeter([SizedItem(TextItem(str(i), "x"), n) for i, n in enumerate(num_bytes)])


def test_nothing_is_promised_before_the_first_chunk() -> None:
    meter = meter_of(100, 300)
    assert (meter.total_bytes, meter.num_items) == (400, 2)
    assert meter.remaining_seconds is None
    meter.take(progress(0, 0.0))
    assert meter.remaining_seconds is None


def test_the_first_document_is_estimated_by_a_typical_text() -> None:
    meter = meter_of(400, 400)
    next(meter.items())
    meter.take(progress(50, 10.0))
    assert meter.reached_bytes == 200
    assert meter.remaining_seconds == pytest.approx(600 / 4 / 10)


def test_later_documents_are_estimated_by_those_before() -> None:
    meter = meter_of(400, 400, 200)
    items = meter.items()
    next(items)
    meter.take(progress(200, 10.0))
    next(items)
    assert meter.reached_bytes == 400
    # Two bytes a token, as in the first document.
    assert meter.remaining_seconds == pytest.approx(600 / 2 / 10)
    meter.take(progress(250, 10.0))
    assert meter.reached_bytes == 500
    # A document of more tokens than expected is not taken for a part of the next one.
    meter.take(progress(900, 10.0))
    assert meter.reached_bytes == 800


def test_documents_that_were_cached_already_say_nothing_about_speed() -> None:
    meter = meter_of(1_000, 400, 400)
    items = meter.items()
    next(items)
    meter.take(progress(0, 0.0))
    next(items)
    meter.take(progress(200, 10.0))
    next(items)
    assert meter.reached_bytes == 1_400
    assert meter.remaining_seconds == pytest.approx(400 / 2 / 10)
    assert next(items, None) is None
    assert meter.remaining_seconds == 0


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.2, "0 s"), (59.4, "59 s"), (60, "1 min 00 s"), (200, "3 min 20 s"), (7_500, "2 h 05 min")],
)
def test_durations_are_for_people(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
