"""The service's figures in Prometheus' form, read from what the core counts when they are asked for.

Owns the metrics' names and labels. Counts nothing itself, and keeps no global registry: each
application has its own.
"""

from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from itertools import accumulate
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from chunkcache.background_verification import BackgroundVerifier
from chunkcache.runtime import Runtime
from chunkcache.serving_meter import HistogramCounts, ServingMeter, Stage
from chunkcache.store.stack import TierStack
from chunkcache_api.auth.key_ring import KeyRing, KeyRingStats
from chunkcache_api.remote_metrics import remote_metrics
from chunkcache_api.service import Service, ServiceState

LabelT = TypeVar("LabelT", bound=str)

_STAGE_METRICS: Final[dict[Stage, tuple[str, str]]] = {
    "queue": ("chunkcache_queue_seconds", "Waiting for the engine."),
    "load": ("chunkcache_load_seconds", "Loading entries, missing ones prefilled."),
    "fuse": ("chunkcache_fuse_seconds", "Placing, probing and recomputing."),
    "first_token": (
        "chunkcache_time_to_first_token_seconds",
        "From submission to the first token.",
    ),
    "inter_token": ("chunkcache_inter_token_latency_seconds", "From a token to the next."),
    "decode": ("chunkcache_decode_seconds", "From the first token to the last."),
}


def metrics_registry(state: ServiceState, keys: KeyRing) -> CollectorRegistry:
    """A registry of one application: its service's figures, and its process's.

    Args:
        state: The application's service, open or not.
        keys: The API keys in force.
    """
    registry = CollectorRegistry()
    registry.register(_ServiceCollector(state, keys))
    ProcessCollector(registry=registry)
    return registry


class _ServiceCollector(Collector):
    """Reads everything anew at each scrape."""

    def __init__(self, state: ServiceState, keys: KeyRing) -> None:
        self._state = state
        self._keys = keys

    def collect(self) -> Iterable[Metric]:
        service = self._state.open_service
        yield InfoMetricFamily(
            "chunkcache_build", "The release that runs.", value={"version": version("chunkcache")}
        )
        yield GaugeMetricFamily(
            "chunkcache_ready", "1 while requests are served.", value=float(service is not None)
        )
        yield from _api_keys(self._keys.stats())
        if service is not None:
            yield from _service_metrics(service)


def _api_keys(stats: KeyRingStats) -> Iterator[Metric]:
    yield GaugeMetricFamily("chunkcache_api_keys", "API keys in force.", value=stats.num_keys)
    yield GaugeMetricFamily(
        "chunkcache_api_keys_stale",
        "1 while the file of keys has changed and cannot be read; the keys of before are in force.",
        value=float(stats.is_stale),
    )
    yield _counters(
        "chunkcache_refused_keys", "Requests refused for their key.", "reason", stats.refused
    )


def _service_metrics(service: Service) -> Iterator[Metric]:
    runtime, model = service.cache.runtime, service.model_name
    yield from _serving(runtime.meter, model)
    yield from _engine(runtime, model)
    yield from _tiers(runtime.stack)
    yield from _verification(runtime.verifier, model)


def _serving(meter: ServingMeter, model: str) -> Iterator[Metric]:
    stats = meter.stats()
    yield _counters(
        "chunkcache_requests", "Requests ended.", "outcome", stats.outcomes, model=model
    )
    yield _counters(
        "chunkcache_prompt_tokens",
        "Prompt tokens by the tier they were reused from, or as recomputed or computed.",
        "source",
        stats.prompt_tokens,
        model=model,
    )
    for name, text, value in (
        (
            "chunkcache_exact_prefix_tokens",
            "Reused prompt tokens that equal a full prefill's.",
            stats.exact_prefix_tokens,
        ),
        (
            "chunkcache_fused_tokens",
            "Reused prompt tokens that were placed and not run.",
            stats.fused_tokens,
        ),
        ("chunkcache_answer_tokens", "Tokens of answers.", stats.answer_tokens),
    ):
        yield _counter(name, text, value, model)
    yield _counters(
        "chunkcache_fallbacks",
        "Warnings in answers: what was done otherwise than asked.",
        "reason",
        stats.fallbacks,
        model=model,
    )
    for stage, (name, text) in _STAGE_METRICS.items():
        yield _histogram(name, text, stats.seconds[stage], model)


def _engine(runtime: Runtime, model: str) -> Iterator[Metric]:
    engine, pool, kept = runtime.engine, runtime.pool, runtime.kept.stats()
    for name, text, value in (
        ("chunkcache_open_requests", "Requests not yet ended.", engine.num_open_requests),
        ("chunkcache_queue_depth", "Requests not yet begun.", engine.num_queued_requests),
        ("chunkcache_pages", "Pages of the KV pool.", pool.num_pages),
        ("chunkcache_free_pages", "Pages of the KV pool that are free.", pool.num_free_pages),
        ("chunkcache_kept_prompt_tokens", "Tokens of finished prompts kept.", kept.tokens),
    ):
        gauge = GaugeMetricFamily(name, text, labels=("model",))
        gauge.add_metric((model,), value)
        yield gauge
    for name, text, value in (
        ("chunkcache_kept_prompt_hits", "Requests begun from a kept prompt.", kept.hits),
        ("chunkcache_kept_prompt_evictions", "Kept blocks that gave way.", kept.evictions),
    ):
        yield _counter(name, text, value, model)


def _tiers(stack: TierStack) -> Iterator[Metric]:
    stats = stack.stats()
    lookups = CounterMetricFamily("chunkcache_lookups", "Lookups of entries, by verifications too.")
    lookups.add_metric((), stats.lookups)
    yield lookups
    yield _counters("chunkcache_hits", "Lookups served from a tier.", "tier", stats.hits)
    yield _counters(
        "chunkcache_misses", "Lookups that no tier could serve.", "reason", stats.misses
    )
    for name, text, value in (
        ("chunkcache_prefills", "Chunks prefilled in isolation.", stats.prefills),
        ("chunkcache_stored_entries", "Entries written to disk.", stats.stored),
    ):
        counter = CounterMetricFamily(name, text)
        counter.add_metric((), value)
        yield counter
    yield _counters(
        "chunkcache_not_stored_entries", "Entries computed, not kept.", "reason", stats.not_stored
    )
    yield _counters(
        "chunkcache_evictions",
        "Entries pushed out of a tier by others.",
        "tier",
        {"host": stats.evictions, "disk": stats.disk_evictions},
    )
    yield _counters(
        "chunkcache_admission_refusals",
        "Entries that a tier did not let in.",
        "tier",
        {"host": stats.rejections},
    )
    yield GaugeMetricFamily(
        "chunkcache_pinned_bytes", "Bytes of entries pinned in RAM.", value=stats.pinned_bytes
    )
    yield _gauges("chunkcache_tier_bytes", "Bytes of the entries of a tier.", stats.bytes)
    yield _gauges("chunkcache_tier_entries", "Entries of a tier.", stats.entries)
    yield GaugeMetricFamily(
        "chunkcache_quarantined_entries",
        "Damaged entries met on disk and taken out.",
        value=stats.quarantined,
    )
    yield GaugeMetricFamily(
        "chunkcache_open_leases", "Leases on entries not yet given back.", value=stats.leases_open
    )
    if stats.remote is not None:
        yield from remote_metrics(stats.remote)


def _verification(verifier: BackgroundVerifier, model: str) -> Iterator[Metric]:
    stats = verifier.stats()
    for name, text, value in (
        ("sampled", "Answers chosen to be verified when the engine is idle.", stats.sampled),
        ("verified", "Chosen answers that were verified.", stats.verified),
        ("dropped", "Chosen answers dropped from a full backlog.", stats.dropped),
        ("failed", "Chosen answers whose verification failed.", stats.failed),
    ):
        yield _counter(f"chunkcache_verify_{name}", text, value, model)
    yield _histogram(
        "chunkcache_verify_kl",
        "Mean KL divergence from the full prefill over an answer's first tokens, in nats.",
        stats.mean_kl,
        model,
    )
    yield _histogram(
        "chunkcache_verify_agreement",
        "Share of an answer's leading tokens that the full prefill gave too.",
        stats.agreement,
        model,
    )


def _counter(name: str, text: str, value: int, model: str) -> Metric:
    counter = CounterMetricFamily(name, text, labels=("model",))
    counter.add_metric((model,), value)
    return counter


def _counters(
    name: str, text: str, label: str, values: Mapping[LabelT, int], *, model: str | None = None
) -> Metric:
    common = {} if model is None else {"model": model}
    counters = CounterMetricFamily(name, text, labels=(*common, label))
    for key, value in values.items():
        counters.add_metric((*common.values(), str(key)), value)
    return counters


def _gauges(name: str, text: str, by_tier: Mapping[str, int]) -> Metric:
    gauges = GaugeMetricFamily(name, text, labels=("tier",))
    for tier, value in by_tier.items():
        gauges.add_metric((tier,), value)
    return gauges


def _histogram(name: str, text: str, counts: HistogramCounts, model: str) -> Metric:
    bounds = (*map(floatToGoString, counts.bounds), "+Inf")
    histogram = HistogramMetricFamily(name, text, labels=("model",))
    buckets = list(zip(bounds, accumulate(counts.counts), strict=True))
    histogram.add_metric((model,), buckets=buckets, sum_value=counts.total)
    return histogram
