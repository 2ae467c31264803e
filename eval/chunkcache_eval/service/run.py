"""One measurement: documents stored, both sides asked in turn, and what is left over afterwards."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from chunkcache.errors import InvalidValueError
from chunkcache_eval.service.load import Asking, LoadResult, Side, run_load
from chunkcache_eval.service.report import ServiceReport, SideReport, overhead_ms, percentile
from chunkcache_eval.service.workload import WorkDocument, Workload

Progress = Callable[[str], None]

SIDES: Final[tuple[Side, ...]] = ("fused", "full")
NUM_IDLE_REQUESTS: Final = 8
SETTLE_SECONDS: Final = 30.0
"""How long what was given up at the end may take to be given back."""
_SETTLE_PAUSE_SECONDS: Final = 0.2


@dataclass(frozen=True)
class LoadPlan:
    """How much is asked.

    Attributes:
        num_clients: Clients at once.
        max_tokens: Largest number of answer tokens.
        num_rounds: How often the sides take turns; each round has its share of the requests.
        max_seconds: Largest time of each side, all rounds together.
    """

    num_clients: int
    max_tokens: int
    num_rounds: int
    max_seconds: float


def measure_service(
    base_url: str, workload: Workload, plan: LoadPlan, progress: Progress = lambda line: None
) -> ServiceReport:
    """Measure a server on this machine that has no documents yet.

    Args:
        base_url: Its address.
        workload: What is stored and asked; both sides are asked the same.
        plan: How much of it at once.
        progress: Told what is going on.

    Raises:
        InvalidValueError: A document could not be stored.
    """
    with httpx.Client(base_url=base_url, timeout=None, trust_env=False) as client:
        _store(client, workload.documents, progress)
        asking = Asking(
            base_url, plan.num_clients, plan.max_tokens, plan.max_seconds / plan.num_rounds
        )
        progress("one client alone")
        idle = [r for r in workload.requests if not r.is_repeated][:NUM_IDLE_REQUESTS]
        alone = run_load(replace(asking, num_clients=1), idle, "fused")
        loads: dict[Side, LoadResult] = {side: LoadResult() for side in SIDES}
        for number in range(plan.num_rounds):
            share = workload.requests[number :: plan.num_rounds]
            for side in SIDES:
                progress(f"round {number + 1} of {plan.num_rounds}, {side}: {len(share)} requests")
                loads[side].add(run_load(asking, share, side))
        progress("looking for what was left over")
        leaks = _leaks(client)
        model = client.get("/v1/models").json()["data"][0]["id"]
    return _report(workload, plan, loads, alone, leaks, model)


def _store(client: httpx.Client, documents: Sequence[WorkDocument], progress: Progress) -> None:
    for number, document in enumerate(documents, 1):
        path = f"/v1/documents/{document.document_id}"
        response = client.put(path, json={"text": document.text})
        if response.is_error:
            raise InvalidValueError(f"a document could not be stored: {response.text}")
        if number % 20 == 0 or number == len(documents):
            progress(f"stored {number} of {len(documents)} documents")


@dataclass(frozen=True)
class _Leaks:
    pages: int
    leases: int
    requests: int


def _leaks(client: httpx.Client) -> _Leaks:
    """What is still held once nothing is asked any more."""
    deadline, pause = time.monotonic() + SETTLE_SECONDS, threading.Event()
    while True:
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(client.get("/metrics").text)
            for sample in family.samples
        }
        leaks = _Leaks(
            pages=int(values["chunkcache_pages"] - values["chunkcache_free_pages"]),
            leases=int(values["chunkcache_open_leases"]),
            requests=int(values["chunkcache_open_requests"]),
        )
        if leaks == _Leaks(0, 0, 0) or time.monotonic() > deadline:
            return leaks
        pause.wait(_SETTLE_PAUSE_SECONDS)


def _report(
    workload: Workload,
    plan: LoadPlan,
    loads: dict[Side, LoadResult],
    alone: LoadResult,
    leaks: _Leaks,
    model: str,
) -> ServiceReport:
    fused, full = (SideReport.of(loads[side]) for side in SIDES)
    results = [*loads.values(), alone]
    repeats = [(s.repeats, s.distinct_repeats) for s in (fused, full) if s.repeats > 1]
    return ServiceReport(
        throughput_ratio=fused.requests_s / full.requests_s if full.requests else float("nan"),
        ttft_ratio=full.ttft_ms / fused.ttft_ms,
        failed=sum(len(r.failures) for r in results),
        health_p99_ms=percentile([ms for r in results for ms in r.health_ms], 0.99),
        overhead_ms=overhead_ms(loads["fused"]),
        idle_overhead_ms=overhead_ms(alone),
        identical=all(distinct == 1 for _, distinct in repeats) if repeats else None,
        leaked_pages=leaks.pages,
        leaked_leases=leaks.leases,
        leaked_requests=leaks.requests,
        failures=tuple(sorted({reason for r in results for reason in r.failures})),
        fused=fused,
        full=full,
        num_documents=len(workload.documents),
        num_clients=plan.num_clients,
        model=model,
    )
