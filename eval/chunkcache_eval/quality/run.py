"""A quality run: every arm on every question of some data sets, resumable line by line.

Owns the order of work, what is skipped and how far it is. How one question is measured, and how
outcomes are kept, are other files' matters.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chunkcache.chunk_cache import ChunkCache
from chunkcache.errors import (
    ContextLengthExceededError,
    DocumentNotFoundError,
    InvalidValueError,
)
from chunkcache.fusion.preparation import Preparation
from chunkcache.neighbours import NeighbourFinder
from chunkcache.precache import PrecacheProgress, TextItem
from chunkcache.settings import Settings
from chunkcache_eval.datasets.records import Question
from chunkcache_eval.quality.arms import Arm
from chunkcache_eval.quality.measure import AnswerLengths, QuestionMeter, document_id_of
from chunkcache_eval.quality.neighbours import (
    NeighbourSource,
    NeighboursOutsidePrompts,
    find_neighbours_by,
)
from chunkcache_eval.quality.outcome import Outcome
from chunkcache_eval.quality.outcome_log import OutcomeKey, OutcomeLog
from chunkcache_eval.quality.prefix_cache import SeenPrompts
from chunkcache_eval.quality.question_set import QuestionSet
from chunkcache_eval.quality.reference import ReferenceShelf

Progress = Callable[[str], None]

_PASSAGES_PER_LINE = 50
"""Passages between two lines of progress while they are pre-cached."""

_CANNOT_BE_ASKED = (ContextLengthExceededError, DocumentNotFoundError, InvalidValueError)


@dataclass(frozen=True)
class SkippedQuestion:
    """A question that was not measured, and why."""

    data: str
    question_id: str
    reason: str


@dataclass(frozen=True)
class QualityRun:
    """What a run gave.

    Attributes:
        outcomes: One per question and arm asked for, those of earlier runs included.
        skipped: Questions left out, once each.
    """

    outcomes: tuple[Outcome, ...]
    skipped: tuple[SkippedQuestion, ...]


def measure_quality(
    sets: Sequence[QuestionSet],
    arms: Sequence[Arm],
    log: OutcomeLog,
    *,
    settings: Settings,
    lengths: AnswerLengths,
    neighbours: NeighbourSource = "embedding",
    progress: Progress = lambda line: None,
) -> QualityRun:
    """Measure what the log does not hold yet.

    Args:
        sets: Data sets of different names.
        arms: With methods ``none`` and ``full`` in front, under each preparation.
        log: Where outcomes go; its folder holds the store too.
        settings: Model, codec and device; the store and the limits of fusion are replaced.
        lengths: How much of the answers counts.
        neighbours: How neighbours are found, for preparations that have some.
        progress: Told what is going on, a line per outcome. What it raises ends the run.

    Raises:
        InvalidValueError: The log holds results of another run.
        ModelError: The model cannot be used.
        StoreError: The store failed.
    """
    log.bind(
        {
            "model": settings.model,
            "codec": settings.codec,
            "device": settings.device,
            "system": settings.system or "built in",
            "compared_tokens": lengths.compared_tokens,
            "scored_tokens": lengths.scored_tokens,
        }
        | {f"digest of {s.name}": s.digest for s in sets}
        | {f"meaning of {arm.name}": arm.meaning for arm in arms}
        | ({"neighbours": neighbours} if any(_has_neighbours(a.preparation) for a in arms) else {})
    )
    run = _Run(log, settings, lengths, neighbours, progress)
    by_preparation: dict[str, list[Arm]] = defaultdict(list)
    for arm in arms:
        by_preparation[arm.preparation].append(arm)
    batches = [
        _Batch(questions, preparation, tuple(group))
        for questions in sets
        for preparation, group in by_preparation.items()
    ]
    run.num_left = sum(len(batch.missing(q, log)) for batch in batches for q in batch.questions)
    for batch in batches:
        run.measure(batch)
    wanted = [key for batch in batches for q in batch.questions for key in batch.keys(q)]
    outcomes = (log.get(key) for key in wanted)
    return QualityRun(
        outcomes=tuple(o for o in outcomes if o is not None),
        skipped=tuple(run.skipped.values()),
    )


@dataclass(frozen=True)
class _Batch:
    """What one open cache serves: a data set under one preparation."""

    questions_of: QuestionSet
    preparation: str
    arms: tuple[Arm, ...]

    @property
    def name(self) -> str:
        return self.questions_of.name

    @property
    def questions(self) -> tuple[Question, ...]:
        return self.questions_of.questions

    def key(self, question: Question, arm: Arm) -> OutcomeKey:
        return (self.name, question.question_id, arm.name, self.preparation, arm.ratio)

    def keys(self, question: Question) -> list[OutcomeKey]:
        return [self.key(question, arm) for arm in self.arms]

    def missing(self, question: Question, log: OutcomeLog) -> list[Arm]:
        return [arm for arm in self.arms if self.key(question, arm) not in log]


class _Run:
    """The state of a run: what is left, what was skipped, since when.

    Attributes:
        num_left: Outcomes still to be measured.
        skipped: By data set and question.
    """

    def __init__(
        self,
        log: OutcomeLog,
        settings: Settings,
        lengths: AnswerLengths,
        neighbours: NeighbourSource,
        progress: Progress,
    ) -> None:
        self.num_left = 0
        self.skipped: dict[tuple[str, str], SkippedQuestion] = {}
        self._log = log
        self._settings = settings
        self._lengths = lengths
        self._shelf = ReferenceShelf(log.folder / "references")
        self._neighbours: NeighbourSource = neighbours
        self._progress = progress
        self._num_done = 0
        self._seconds = 0.0

    def measure(self, batch: _Batch) -> None:
        """Measure what a batch lacks; a cache is opened only for that."""
        pending = [q for q in batch.questions if batch.missing(q, self._log)]
        if not pending:
            return
        with ChunkCache.open(progress=self._progress, **self._values(batch)) as cache:
            runner = cache.runtime.model.runner
            self._log.bind({"model_digest": runner.digest.hex(), "dtype": str(runner.dtype)})
            pending = [q for q in pending if self._can_fit(cache, batch, q)]
            _warm_up(cache)
            failures = self._precache(cache, batch, pending)
            num_seen = self._seen_tokens(cache, batch)
            for question in pending:
                self._measure_question(cache, batch, question, failures, num_seen)

    def _values(self, batch: _Batch) -> dict[str, Any]:
        """The cache's settings: every passage is one chunk, and every arm runs as it was asked.

        Entries come from disk each time, so that no arm's time depends on the one before it.
        """
        most_passages = max(len(q.passages) for q in batch.questions)
        settings = self._settings
        return settings.model_dump() | {
            "store": self._log.folder / "store",
            "preparation": batch.preparation,
            "chunk_tokens": 1024,
            "host_tier_bytes": 0,
            "kept_prompts_ratio": 0.0,
            "min_fused_context_tokens": 0,
            "min_mean_chunk_tokens": 0,
            "max_fused_ratio": 1.0,
            "max_documents_per_request": max(settings.max_documents_per_request, most_passages),
        }

    def _can_fit(self, cache: ChunkCache, batch: _Batch, question: Question) -> bool:
        """Whether a question's passages alone fit: those of one that cannot are not pre-cached."""
        tokenizer = cache.runtime.model.tokenizer
        limit = cache.runtime.model.runner.spec.max_positions
        num_tokens = sum(len(tokenizer.encode_content(p.text)) for p in question.passages)
        if num_tokens < limit:
            return True
        self._skip(batch, question, f"its {num_tokens} context tokens do not fit {limit}")
        return False

    def _precache(
        self, cache: ChunkCache, batch: _Batch, questions: Sequence[Question]
    ) -> dict[str, str]:
        """Cache the passages.

        Returns:
            Why some could not be cached, by document.
        """
        texts = {document_id_of(p): p.text for q in questions for p in q.passages}
        where = f"{batch.name}, {batch.preparation}"
        self._progress(f"pre-caching {len(texts)} passages ({where})")
        reported = ("", 0)

        def report(state: PrecacheProgress) -> None:
            nonlocal reported
            did, done, total = "pre-cached", state.documents, len(texts)
            if state.chunks_to_prepare:
                done, total = state.prepared_chunks, state.chunks_to_prepare
            elif finder is not None:
                did = "stored"
            num_before = reported[1] if reported[0] == did else 0
            if done - num_before >= _PASSAGES_PER_LINE:
                reported = did, done
                self._progress(f"{did} {done} of {total} passages ({where})")

        finder: NeighbourFinder | None = None
        asked = set(texts)
        if _has_neighbours(batch.preparation):
            corpus = (*batch.questions, *batch.questions_of.further)
            texts = {document_id_of(p): p.text for q in corpus for p in q.passages}
            finder = NeighboursOutsidePrompts(
                find_neighbours_by(self._neighbours, cache.catalog, self._progress),
                cache.catalog,
                corpus,
            )
        summary = cache.precache(
            (TextItem(name, text) for name, text in texts.items()),
            neighbours=finder,
            document_ids=asked,
            on_progress=report,
        )
        return {failure.item: failure.message for failure in summary.failures}

    def _seen_tokens(self, cache: ChunkCache, batch: _Batch) -> dict[str, int]:
        """What a prefix cache had seen of each prompt, had all been asked in the file's order.

        By question; those that cannot be asked are left out.
        """
        if not any(arm.variant == "behind seen prefix" for arm in batch.arms):
            return {}
        prompts = SeenPrompts()
        num_seen: dict[str, int] = {}
        for question in batch.questions:
            meter = QuestionMeter(cache, batch.name, question, self._lengths, self._shelf)
            try:
                meter.check_fits()
            except _CANNOT_BE_ASKED:
                continue
            num_seen[question.question_id] = prompts.add(meter.prompt_ids)
        return num_seen

    def _measure_question(
        self,
        cache: ChunkCache,
        batch: _Batch,
        question: Question,
        failures: dict[str, str],
        num_seen: dict[str, int],
    ) -> None:
        num_seen_tokens = num_seen.get(question.question_id, 0)
        meter = QuestionMeter(
            cache, batch.name, question, self._lengths, self._shelf, num_seen_tokens
        )
        for passage in question.passages:
            if reason := failures.get(document_id_of(passage)):
                self._skip(batch, question, f"passage {passage.passage_id!r}: {reason}")
                return
        try:
            meter.check_fits()
        except _CANNOT_BE_ASKED as error:
            self._skip(batch, question, error.message)
            return
        for arm in batch.missing(question, self._log):
            began = time.perf_counter()
            bound = self._log.get(
                (batch.name, question.question_id, "none", batch.preparation, None)
            )
            outcome = meter.measure(arm, None if bound is None else bound.f1)
            self._log.append(outcome)
            self._tell(outcome, arm, time.perf_counter() - began)

    def _skip(self, batch: _Batch, question: Question, reason: str) -> None:
        key = (batch.name, question.question_id)
        self.num_left -= len(batch.missing(question, self._log))
        if key not in self.skipped:
            self.skipped[key] = SkippedQuestion(*key, reason)
            self._progress(f"skipped {batch.name} {question.question_id}: {reason}")

    def _tell(self, outcome: Outcome, arm: Arm, seconds: float) -> None:
        self._num_done += 1
        self.num_left -= 1
        self._seconds += seconds
        left = self._seconds / self._num_done * self.num_left
        self._progress(
            f"{self._num_done}/{self._num_done + self.num_left} {outcome.data} "
            f"{outcome.question_id} {arm}: KL {outcome.mean_kl:.4f}, {outcome.ttft_ms:,.0f} ms; "
            f"{_duration(left)} left"
        )


def _has_neighbours(preparation: str) -> bool:
    return Preparation.parse(preparation).kind == "neighbours"


def _warm_up(cache: ChunkCache) -> None:
    """Thread pools, allocators and the template's entries are up before anything is timed."""
    name = "warm-up"
    cache.put(name, "This text is here to be read once before anything is measured.")
    for policy in ("full", "none"):
        cache.answer("Ready?", [name], policy=policy, max_tokens=2)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
