"""Peak memory, measured in processes of their own: what one did must not count for another."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from chunkcache_eval.datasets.records import Question


@dataclass(frozen=True)
class MemoryReport:
    """Peak resident memory in megabytes (10**6 bytes).

    Attributes:
        answer: Of a process that answers the longest question from disk, model load included.
        answer_limit: Weights + 2 x that prompt's keys and values + 600 MB.
        precache_half: Of a process that pre-caches half of the passages into an empty store.
        precache_all: Of one that pre-caches all of them: flat if both are about the same.
    """

    answer: float
    answer_limit: float
    precache_half: float
    precache_all: float


def measure_memory(
    settings: dict[str, Any], longest: Question, questions: Sequence[Question]
) -> MemoryReport:
    """Run the three processes.

    Args:
        settings: Settings of the store that already holds every passage.
        longest: The question to answer.
        questions: All questions, whose passages are pre-cached anew.
    """
    store = Path(settings["store"])
    answer = _child("answer", settings, {"question": asdict(longest)})
    passages = list({p.passage_id: p for q in questions for p in q.passages}.values())
    peaks = []
    for name, share in (("half", passages[: len(passages) // 2 or 1]), ("all", passages)):
        values = settings | {"store": store.with_name(f"memory-{name}")}
        peaks.append(_child("precache", values, {"passages": [asdict(p) for p in share]})["peak"])
    return MemoryReport(answer["peak"], answer["limit"], peaks[0], peaks[1])


def _child(task: str, settings: dict[str, Any], work: dict[str, Any]) -> dict[str, float]:
    job = msgspec.json.encode({"task": task, "settings": settings, **work}, enc_hook=str)
    done = subprocess.run(
        [sys.executable, "-m", "chunkcache_eval.memory"], input=job, capture_output=True, check=True
    )
    return json.loads(done.stdout)


def _run_child() -> None:
    """What a child process does: one task, then its peak on stdout."""
    from chunkcache.chunk_cache import ChunkCache
    from chunkcache.precache import TextItem
    from chunkcache_api.cli.retrieval import make_neighbours

    job = json.load(sys.stdin)
    limit = 0.0
    with ChunkCache.open(**job["settings"]) as cache:
        if job["task"] == "precache":
            items = (TextItem(p["passage_id"], p["text"]) for p in job["passages"])
            cache.precache(items, neighbours=make_neighbours(cache, lambda line: None))
        else:
            question = job["question"]
            ids = [p["passage_id"] for p in question["passages"]]
            answer = cache.answer(question["question"], ids, max_tokens=8)
            runner = cache.runtime.model.runner
            spec = runner.spec
            num_tokens = answer.report.account.prompt_tokens
            kv_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
            kv_bytes *= num_tokens * runner.dtype.itemsize
            weight_bytes = sum(p.nbytes for p in runner.hf_model.parameters())
            limit = (weight_bytes + 2 * kv_bytes) / 1e6 + 600
    json.dump({"peak": _peak_rss_mb(), "limit": limit}, sys.stdout)


def _peak_rss_mb() -> float:
    """This process's peak since it began.

    ``getrusage`` would also count what the parent held at the fork, so Linux's own counter is read
    where there is one.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(s for s in status.read_text().splitlines() if s.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 / 1e6
    from resource import RUSAGE_SELF, getrusage

    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return getrusage(RUSAGE_SELF).ru_maxrss * unit_bytes / 1e6


if __name__ == "__main__":
    _run_child()
