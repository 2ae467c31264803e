"""The ``Server-Timing`` header: where a response's time went, for browsers' and proxies' tools."""

from dataclasses import asdict
from typing import Final

from chunkcache.results import Timings

HEADER: Final = b"server-timing"


def timing_value(timings: Timings) -> bytes:
    """The header's value behind an answer; milliseconds by stage."""
    spent = {name.removesuffix("_ms"): value for name, value in asdict(timings).items()}
    return ", ".join(f"{name};dur={value:.3f}" for name, value in spent.items()).encode()


def planning_value(plan_ms: float) -> bytes:
    """The header's value where only planning is over."""
    return f"plan;dur={plan_ms:.3f}".encode()
