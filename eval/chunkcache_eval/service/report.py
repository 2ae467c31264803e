"""What a measurement of the service came to, and as what it is printed."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from chunkcache_eval.service.load import LoadResult


@dataclass(frozen=True)
class SideReport:
    """One side's figures.

    Attributes:
        requests: Requests answered.
        requests_s: The same per second.
        ttft_ms: Median milliseconds to the first token, seen by the client.
        ttft_p95_ms: 95 % of the first tokens came sooner.
        failed: Requests that failed, looks at the server's health included.
        cut_off: Requests given up when the time was over.
        reused_ratio: Share of the prompt tokens that were not run.
        fell_back: Answers for which another policy ran than asked for.
        distinct_repeats: Different answers, logits included, to the request that was repeated.
        repeats: How often it was answered.
    """

    requests: int
    requests_s: float
    ttft_ms: float
    ttft_p95_ms: float
    failed: int
    cut_off: int
    reused_ratio: float
    fell_back: int
    distinct_repeats: int
    repeats: int

    @classmethod
    def of(cls, result: LoadResult) -> "SideReport":
        """The figures of a load."""
        return cls(
            requests=result.completed,
            requests_s=result.completed / result.seconds,
            ttft_ms=percentile(result.ttft_ms, 0.5),
            ttft_p95_ms=percentile(result.ttft_ms, 0.95),
            failed=len(result.failures),
            cut_off=result.cut_off,
            reused_ratio=result.cached_tokens / max(1, result.prompt_tokens),
            fell_back=result.fell_back,
            distinct_repeats=len(set(result.repeated)),
            repeats=len(result.repeated),
        )


@dataclass(frozen=True)
class ServiceReport:
    """All of it.

    Attributes:
        throughput_ratio: Requests per second, fused over full.
        ttft_ratio: Median time to the first token, full over fused.
        failed: Requests that failed, on both sides.
        health_p99_ms: 99 % of the looks at the server's health took less.
        overhead_ms: Median of the time to the first token less the engine's, fused under load.
        idle_overhead_ms: The same with one client.
        identical: Whether each side always gave the same answer, logits included, to the request
            that was repeated; None where none was answered twice.
        leaked_pages: Pages of the KV pool that were not given back.
        leaked_leases: Leases on entries likewise.
        leaked_requests: Requests that never ended.
        failures: Why requests failed, each reason once.
        fused: The side that is fused.
        full: The side that runs full prefills.
        num_documents: Documents stored.
        num_clients: Clients at once.
        model: What the server calls its model.
    """

    throughput_ratio: float
    ttft_ratio: float
    failed: int
    health_p99_ms: float
    overhead_ms: float
    idle_overhead_ms: float
    identical: bool | None
    leaked_pages: int
    leaked_leases: int
    leaked_requests: int
    failures: tuple[str, ...]
    fused: SideReport
    full: SideReport
    num_documents: int
    num_clients: int
    model: str

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def overhead_ms(result: LoadResult) -> float:
    """Median of what the client saw less what the engine took."""
    pairs = zip(result.ttft_ms, result.engine_ttft_ms, strict=True)
    return percentile([seen - engine for seen, engine in pairs], 0.5)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share of the values does not exceed; NaN of none."""
    if not values:
        return math.nan
    if share == 0.5:
        return statistics.median(values)
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def service_table(report: ServiceReport) -> Table:
    """The report, for a person."""
    table = Table(
        title=f"{report.model}: {report.num_clients} clients, {report.num_documents} documents",
        box=None,
    )
    for name in ("", "fused", "full", "ratio"):
        table.add_column(name, justify="right" if name else "left")
    fused, full = report.fused, report.full
    table.add_row("requests", f"{fused.requests:,}", f"{full.requests:,}", "")
    table.add_row(
        "requests/s",
        f"{fused.requests_s:.2f}",
        f"{full.requests_s:.2f}",
        f"{report.throughput_ratio:.2f}",
    )
    table.add_row(
        "first token, median ms",
        f"{fused.ttft_ms:,.0f}",
        f"{full.ttft_ms:,.0f}",
        f"{report.ttft_ratio:.2f}",
    )
    table.add_row(
        "first token, p95 ms", f"{fused.ttft_p95_ms:,.0f}", f"{full.ttft_p95_ms:,.0f}", ""
    )
    table.add_row("reused", f"{fused.reused_ratio:.1%}", f"{full.reused_ratio:.1%}", "")
    table.add_row("fell back", f"{fused.fell_back:,}", f"{full.fell_back:,}", "")
    table.add_row("failed", f"{fused.failed:,}", f"{full.failed:,}", "")
    table.add_row("given up at the end", f"{fused.cut_off:,}", f"{full.cut_off:,}", "")
    table.add_row(
        "same answers",
        f"{fused.repeats:,} in {fused.distinct_repeats} form(s)",
        f"{full.repeats:,} in {full.distinct_repeats} form(s)",
        "",
    )
    return table
