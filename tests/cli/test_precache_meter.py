"""How far a run is: bytes done, and an estimate of the rest."""

from collections.abc import Callable

import pytest

from chunkcache.precache import PrecacheProgress, TextItem
from chunkcache_api.cli.precache_display import duration
from chunkcache_api.cli.precache_meter import PrecacheMeter, SizedItem

Report = Callable[..., None]


def meter_of(*num_bytes: int) -> tuple[PrecacheMeter, Report]:
    """A meter over items of these sizes, and a way to report to it at a time."""
    now = [0.0]
    sized_items = [SizedItem(TextItem(str(i), "x"), n) for i, n in enumerate(num_bytes)]
    meter = PrecacheMeter(sized_items, clock=lambda: now[0])

    def report(at: float, *, done: int = 0, failed: int = 0, tokens: int = 0) -> None:
        now[0] = at
        meter.take(
            PrecacheProgress(
                item="a",
                documents=done,
                prefilled_chunks=0,
                prefilled_tokens=tokens,
                tokens_per_second=0.0,
                failures=failed,
            )
        )

    return meter, report


def test_nothing_is_promised_before_the_first_chunk() -> None:
    meter, report = meter_of(100, 300)
    assert (meter.total_bytes, meter.num_items) == (400, 2)
    assert meter.remaining_seconds is None
    report(1.0, failed=1)
    assert meter.remaining_seconds is None
    assert meter.reached_bytes == 100


def test_the_first_document_is_estimated_by_a_typical_text() -> None:
    meter, report = meter_of(400, 400)
    report(5.0, tokens=50)
    assert meter.tokens_per_second == 10
    assert meter.reached_bytes == 200
    assert meter.remaining_seconds == pytest.approx(600 / 4 / 10)


def test_later_documents_are_estimated_by_those_before() -> None:
    meter, report = meter_of(400, 400, 200)
    report(20.0, done=1, tokens=200)
    assert meter.reached_bytes == 400
    # Two bytes a token, as in the first document.
    assert meter.remaining_seconds == pytest.approx(600 / 2 / 10)
    report(25.0, done=1, tokens=250)
    assert meter.reached_bytes == 500
    # A document of more tokens than expected is not taken for a part of the next one.
    report(90.0, done=1, tokens=900)
    assert meter.reached_bytes == 800


def test_documents_that_were_cached_already_say_nothing_about_speed() -> None:
    meter, report = meter_of(1_000, 400, 400)
    report(60.0, done=1)
    report(80.0, done=2, tokens=200)
    assert meter.tokens_per_second == 10
    assert meter.reached_bytes == 1_400
    assert meter.remaining_seconds == pytest.approx(400 / 2 / 10)
    report(100.0, done=3, tokens=400)
    assert meter.reached_bytes == meter.total_bytes
    assert meter.remaining_seconds == 0


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.2, "0 s"), (59.4, "59 s"), (60, "1 min 00 s"), (200, "3 min 20 s"), (7_500, "2 h 05 min")],
)
def test_durations_are_for_people(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
