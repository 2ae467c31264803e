"""One question at every ratio that ``auto`` chooses from: what it sees, what is true, what it costs.

Distributions are compared over the full prefill's own greedy answer, which rides along. Which ratio
``auto`` would choose does not change what stands here, so any target can be replayed from it. Knows
nothing of files.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec

from chunkcache.chunk_cache import ChunkCache
from chunkcache.engine.request import GenerationJob
from chunkcache.engine.sampling import SamplingParams
from chunkcache.estimate import EstimateReport
from chunkcache.fusion.fidelity import mean_kl
from chunkcache.fusion.policies.auto_rows import row_sets
from chunkcache.fusion.policy import Candidates, Policy, RowSelection
from chunkcache.identity import digest_fields
from chunkcache.planning import AskOptions
from chunkcache.verification import COMPARED_TOKENS
from chunkcache_eval.datasets.records import Question
from chunkcache_eval.quality.measure import document_id_of


class Point(msgspec.Struct, frozen=True):
    """A question at one ratio.

    Attributes:
        ratio: Share of the candidates that ran.
        mean_kl: Mean KL divergence (nats) from the full prefill over its answer.
        charged_ratio: Rows run over layers times context tokens; the answer that rode along is not
            counted.
        signals: What ``auto`` goes by.
    """

    ratio: float
    mean_kl: float
    charged_ratio: float
    signals: tuple[float, ...]


class Trace(msgspec.Struct, frozen=True):
    """A question at every ratio.

    Attributes:
        data: Name of the data set.
        question_id: The question.
        text_digest: Hex digest of its text and its passages'.
        num_context_tokens: Chunk tokens of its prompt.
        full_charged_ratio: Charged ratio where everything runs behind the probe.
        points: By ratio, ascending.
    """

    data: str
    question_id: str
    text_digest: str
    num_context_tokens: int
    full_charged_ratio: float
    points: tuple[Point, ...]


def chosen_point(trace: Trace, bounds: Sequence[float], target_kl: float) -> Point | None:
    """What ``auto`` chooses; None where everything runs.

    Args:
        trace: The question.
        bounds: Per ratio, what is taken for a bound on the divergence, in nats.
        target_kl: The target.
    """
    pairs = zip(trace.points, bounds, strict=True)
    return next((point for point, bound in pairs if bound <= target_kl), None)


@dataclass(frozen=True)
class _AtRatio(Policy):
    """A row set of ``auto``, whatever is to be seen of it, which it says."""

    ratio: float

    name: ClassVar[str] = "auto-at-ratio"

    def select(self, candidates: Candidates) -> RowSelection:
        (rows,) = row_sets(candidates, [self.ratio])
        report = EstimateReport(math.inf, math.inf, self.ratio, False, rows.signals)
        return RowSelection(rows.chosen, estimate=report)


def text_digest(question: Question) -> str:
    """Names what was asked over what, in hex."""
    fields = [("question", question.question)]
    fields += [("passage", document_id_of(p)) for p in question.passages]
    return digest_fields("traced question", fields).hex()


def trace_question(
    cache: ChunkCache, data: str, question: Question, ratios: Sequence[float]
) -> Trace:
    """Run a question at every ratio. Its passages are stored for that, one chunk each, and removed.

    Args:
        cache: Without limits to what is fused.
        data: Name of the data set.
        question: The question.
        ratios: Ascending.

    Raises:
        ContextLengthExceededError: The prompt does not fit.
        InvalidValueError: A text is not acceptable, or there is no passage.
    """
    stored: set[str] = set()
    try:
        for passage in question.passages:
            stored.add(cache.put(document_id_of(passage), passage.text).document_id)
        return _trace(cache, data, question, ratios)
    finally:
        for name in stored:
            cache.delete(name)


def _trace(cache: ChunkCache, data: str, question: Question, ratios: Sequence[float]) -> Trace:
    engine = cache.runtime.engine
    documents = [document_id_of(p) for p in question.passages]
    plan = cache.plan(question.question, documents, AskOptions(policy="none", max_tokens=1))
    engine.check_fits(plan.layout.num_tokens + COMPARED_TOKENS)
    full = engine.submit(
        GenerationJob(
            plan.in_full(), SamplingParams(), COMPARED_TOKENS, num_kept_logits=COMPARED_TOKENS
        )
    ).result()
    reference = full.step_logits
    assert reference is not None
    answer_ids = full.token_ids[: len(reference) - 1]
    num_context_tokens = plan.layout.num_context_tokens
    riding = len(answer_ids) / num_context_tokens
    points: list[Point] = []
    for ratio in ratios:
        policy = _AtRatio(ratio)
        scoring = replace(plan, policy=policy, requested_policy=policy).scoring(answer_ids)
        scored = engine.submit(GenerationJob(scoring, SamplingParams(), 1)).result()
        report = scored.report
        assert report.estimate is not None
        kl = mean_kl(reference, scored.scored_logits)
        signals = report.estimate.signals
        points.append(Point(ratio, kl, report.charged_ratio - riding, signals))
    last = points[-1]
    return Trace(
        data=data,
        question_id=question.question_id,
        text_digest=text_digest(question),
        num_context_tokens=num_context_tokens,
        full_charged_ratio=last.charged_ratio + 1.0 - last.ratio,
        points=tuple(points),
    )
