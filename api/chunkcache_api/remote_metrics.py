"""The remote tier's figures in Prometheus' form. Owns these metrics' names; counts nothing itself."""

from collections.abc import Iterator, Mapping
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from chunkcache.store.remote.breaker import BreakerState
from chunkcache.store.remote.stats import RemoteStats

LabelT = TypeVar("LabelT", bound=str)


def remote_metrics(stats: RemoteStats) -> Iterator[Metric]:
    """The metrics of a remote tier."""
    state = GaugeMetricFamily(
        "chunkcache_remote_breaker",
        "1 for the state that the remote's circuit breaker is in.",
        labels=("state",),
    )
    for name in BreakerState:
        state.add_metric((name.value,), float(name is stats.state))
    yield state
    yield _labelled(
        "chunkcache_remote_misses", "Entries that did not come from the remote.", stats.misses
    )
    yield _labelled(
        "chunkcache_remote_failures", "Calls to the remote that failed.", stats.failures
    )
    for name, text, value in (
        ("hits", "Entries that came from the remote.", stats.hits),
        ("opened", "Times that the remote had to be left alone.", stats.num_opened),
        ("read_bytes", "Bytes that came from the remote.", stats.read_bytes),
        ("sent_entries", "Entries written to the remote.", stats.sent),
        ("sent_bytes", "Bytes written to the remote.", stats.sent_bytes),
        ("removed_entries", "Entries removed from the remote.", stats.removed),
        ("dropped_entries", "Entries that left the disk before they were sent.", stats.dropped),
    ):
        counter = CounterMetricFamily(f"chunkcache_remote_{name}", text)
        counter.add_metric((), value)
        yield counter
    for name, text, value in (
        ("to_send", "Entries that wait to be sent to the remote.", stats.to_send),
        ("to_remove", "Removals from the remote not confirmed yet.", stats.to_remove),
    ):
        yield GaugeMetricFamily(f"chunkcache_remote_{name}", text, value=value)


def _labelled(name: str, text: str, values: Mapping[LabelT, int]) -> Metric:
    counters = CounterMetricFamily(name, text, labels=("reason",))
    for key, value in values.items():
        counters.add_metric((str(key),), value)
    return counters
