"""A calibration run: questions traced, split in two, a table fitted on one half, checked on the other.

Owns the order of work and the split. What is measured of a question is another file's matter.
"""

import hashlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from chunkcache.auto_calibration import auto_fingerprint
from chunkcache.chunk_cache import ChunkCache
from chunkcache.errors import ContextLengthExceededError, InvalidValueError
from chunkcache.fusion.policies.auto_table import AutoTable
from chunkcache.fusion.preparation import Preparation
from chunkcache.settings import Settings
from chunkcache_eval.auto.fit import MIN_QUESTIONS, fit_table
from chunkcache_eval.auto.trace import Trace, text_digest, trace_question
from chunkcache_eval.auto.trace_log import TraceLog
from chunkcache_eval.auto.validation import FixedRatio, TargetCheck, check_target, fixed_ratios
from chunkcache_eval.datasets.records import Question
from chunkcache_eval.quality.question_set import QuestionSet

RATIOS = (0.05, 0.1, 0.15, 0.25, 0.4, 0.55)
"""Ratios that a table chooses from."""
TARGETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1)
"""Mean KL divergences in nats that are checked where none are named."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class AutoRun:
    """What a run gave.

    Attributes:
        table: Fitted on the questions that were not held back.
        checks: Per target, on those that were.
        fixed: ``hybrid`` at fixed ratios on the same ones.
        skipped: Questions left out, with the reason.
    """

    table: AutoTable
    checks: tuple[TargetCheck, ...]
    fixed: tuple[FixedRatio, ...]
    skipped: tuple[str, ...]


def calibrate_auto(
    sets: Sequence[QuestionSet],
    out: Path,
    targets: Sequence[float],
    *,
    settings: Settings,
    max_context_tokens: int | None = None,
    progress: Progress = lambda line: None,
) -> AutoRun:
    """Trace what the folder does not hold yet, fit, and check.

    Args:
        sets: Data sets of different names.
        out: Folder of the traces.
        targets: Targets to check, in nats.
        settings: Model, codec, preparation and device.
        max_context_tokens: Longer prompts are left out.
        progress: Told what is going on.

    Raises:
        InvalidValueError: Too few questions; or a setting or the folder does not fit.
        ModelError: The model cannot be used.
        StoreError: The store failed.
    """
    if Preparation.parse(settings.preparation).kind == "neighbours":
        raise InvalidValueError(
            "neighbours are those of a corpus: `auto` cannot be calibrated over them",
            param="preparation",
        )
    with (
        tempfile.TemporaryDirectory(prefix="chunkcache-auto-") as folder,
        ChunkCache.open(progress=progress, **_values(settings, Path(folder), sets)) as cache,
    ):
        runtime = cache.runtime
        fingerprint = auto_fingerprint(runtime)
        log = TraceLog(out, {"fingerprint": fingerprint, "ratios": repr(RATIOS)})
        tracing = _Tracing(cache, log, max_context_tokens, progress)
        traces = tracing.run(sets)
        name = runtime.model.runner.name
    learned = [t for t in traces if not is_held_back(t.data, t.question_id)]
    held_back = [t for t in traces if is_held_back(t.data, t.question_id)]
    if min(len(learned), len(held_back)) < MIN_QUESTIONS:
        raise InvalidValueError(
            f"{len(learned)} questions to calibrate on and {len(held_back)} held back: of each, "
            f"{MIN_QUESTIONS} are needed",
            param="data",
        )
    table = fit_table(
        learned,
        model_name=name,
        preparation=settings.preparation,
        codec=settings.codec,
        fingerprint=fingerprint,
    )
    return AutoRun(
        table,
        tuple(check_target(table, held_back, t) for t in targets),
        tuple(fixed_ratios(held_back)),
        tuple(tracing.skipped),
    )


def is_held_back(data: str, question_id: str) -> bool:
    """Whether a question is kept for the check: one half of them, by a digest of their names."""
    return hashlib.sha256(f"{data}/{question_id}".encode()).digest()[0] % 2 == 1


class _Tracing:
    """Traces questions, one after the other.

    Attributes:
        skipped: Those left out, with the reason.
    """

    def __init__(
        self, cache: ChunkCache, log: TraceLog, max_context_tokens: int | None, progress: Progress
    ) -> None:
        self.skipped: list[str] = []
        self._cache = cache
        self._log = log
        self._max_context_tokens = max_context_tokens
        self._progress = progress

    def run(self, sets: Sequence[QuestionSet]) -> list[Trace]:
        """All traces, those of earlier runs included; the sets take turns."""
        turns = zip_longest(*(s.questions for s in sets))
        names = [s.name for s in sets]
        wanted = [
            (name, q)
            for turn in turns
            for name, q in zip(names, turn, strict=True)
            if q is not None
        ]
        traces = []
        seconds, num_measured = 0.0, 0
        for number, (data, question) in enumerate(wanted, 1):
            found = self._log.get(data, question.question_id, text_digest(question))
            if found is None:
                began = time.perf_counter()
                found = self._trace(data, question)
                seconds, num_measured = seconds + time.perf_counter() - began, num_measured + 1
                left = seconds / num_measured * (len(wanted) - number)
                self._progress(
                    f"{number}/{len(wanted)} {data} {question.question_id}; {left / 60:.0f} min left"
                )
            if found is not None:
                traces.append(found)
        return traces

    def _trace(self, data: str, question: Question) -> Trace | None:
        limit = self._max_context_tokens
        try:
            encode = self._cache.runtime.model.tokenizer.encode_content
            num_tokens = sum(len(encode(p.text)) for p in question.passages)
            if limit is not None and num_tokens > limit:
                raise ContextLengthExceededError(f"{num_tokens} context tokens, over {limit}")
            trace = trace_question(self._cache, data, question, RATIOS)
        except (ContextLengthExceededError, InvalidValueError) as error:
            self.skipped.append(f"{data} {question.question_id}: {error.message}")
            return None
        self._log.append(trace)
        return trace


def _values(settings: Settings, folder: Path, sets: Sequence[QuestionSet]) -> dict[str, Any]:
    """The cache's settings: a store of its own, every passage one chunk, nothing run in full."""
    most_passages = max(len(q.passages) for s in sets for q in s.questions)
    return settings.model_dump() | {
        "store": folder / "store",
        "chunk_tokens": 1024,
        "min_fused_context_tokens": 0,
        "min_mean_chunk_tokens": 0,
        "max_documents_per_request": max(settings.max_documents_per_request, most_passages),
    }
