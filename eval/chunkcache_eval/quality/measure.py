"""One question under one open cache: the full prefill's answer, and each arm's beside it.

All arms see the same token ids. Times and charged ratios are of the run that generates the arm's
own answer; so are the distributions, where that is the full prefill's answer, else they are of a
second run, in which the full prefill's answer rides along.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from chunkcache.chunk_cache import ChunkCache
from chunkcache.engine.request import GenerationJob
from chunkcache.engine.sampling import SamplingParams
from chunkcache.engine.stream import Finished
from chunkcache.errors import ContextLengthExceededError, InvalidValueError
from chunkcache.fusion.fidelity import kl_divergence, leading_agreement, mean_kl
from chunkcache.fusion.plan import FusionPlan
from chunkcache.fusion.policies.registry import PolicyOptions
from chunkcache.planning import AskOptions
from chunkcache_eval.datasets.records import Passage, Question
from chunkcache_eval.quality.arms import Arm
from chunkcache_eval.quality.metrics import score_answer
from chunkcache_eval.quality.outcome import Outcome
from chunkcache_eval.quality.prefix_cache import run_behind_prefix
from chunkcache_eval.quality.reference import Reference, ReferenceShelf
from chunkcache_eval.quality.row_order_mask import bottom_right_positions


@dataclass(frozen=True)
class AnswerLengths:
    """How much of an answer is looked at.

    Attributes:
        compared_tokens: Tokens of the full prefill's greedy answer that distributions and
            agreement are measured over.
        scored_tokens: Tokens of the greedy answers that are scored against the gold answers.
    """

    compared_tokens: int = 8
    scored_tokens: int = 32

    def __post_init__(self) -> None:
        """One generation serves both."""
        if not 1 <= self.compared_tokens <= self.scored_tokens:
            raise InvalidValueError(
                f"{self.compared_tokens} compared answer tokens are not within 1 and the "
                f"{self.scored_tokens} scored ones",
                param="answer_tokens",
            )


@dataclass(frozen=True)
class _Fidelity:
    """How close an arm's distributions and tokens are to the full prefill's."""

    kl_first: float
    mean_kl: float
    agreement: float


@dataclass(frozen=True)
class _Ran:
    """What became of a question under one arm."""

    answer: str
    charged_ratio: float
    ttft_ms: float
    fidelity: _Fidelity


_EXACT = _Fidelity(0.0, 0.0, 1.0)


def document_id_of(passage: Passage) -> str:
    """The document that holds a passage: by its text, as files may use an id for two texts."""
    return hashlib.sha256(passage.text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class QuestionMeter:
    """Measures arms on one question.

    Args:
        cache: Holds the question's passages.
        data: Name of the data set.
        question: The question.
        lengths: How much of the answers counts.
        shelf: Where the full prefill's answers are kept.
        num_seen_tokens: Tokens of the prompt that an earlier prompt began with.
    """

    def __init__(
        self,
        cache: ChunkCache,
        data: str,
        question: Question,
        lengths: AnswerLengths,
        shelf: ReferenceShelf,
        num_seen_tokens: int = 0,
    ) -> None:
        self._cache = cache
        self._data = data
        self._question = question
        self._lengths = lengths
        self._shelf = shelf
        self._num_seen_tokens = num_seen_tokens
        self._documents = [document_id_of(p) for p in question.passages]

    def check_fits(self) -> None:
        """Refuse a prompt that leaves no room for the answers.

        Raises:
            ContextLengthExceededError: It is too long.
            DocumentNotFoundError: A passage is not cached.
            InvalidValueError: The question is no valid text.
        """
        num_tokens = self._plan("full", PolicyOptions()).layout.num_tokens
        room = self._cache.runtime.engine.check_fits(num_tokens)
        if room < self._lengths.scored_tokens:
            raise ContextLengthExceededError(
                f"the prompt has {num_tokens} tokens, which leaves room for {room} answer tokens "
                f"of {self._lengths.scored_tokens}"
            )

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Token ids of the prompt; errors as of :meth:`check_fits`."""
        return self._plan("full", PolicyOptions()).layout.token_ids

    @cached_property
    def full(self) -> Reference:
        """The full prefill's greedy answer, run when first asked for if it is not kept."""
        plan = self._plan("full", PolicyOptions())
        prompt_ids = plan.layout.token_ids
        kept = self._shelf.get(prompt_ids)
        if kept is not None:
            return kept
        answer = self._generate(plan)
        assert answer.step_logits is not None
        reference = Reference(
            text=answer.text,
            token_ids=answer.token_ids,
            logits=answer.step_logits,
            prompt_tokens=answer.report.account.prompt_tokens,
            charged_ratio=answer.report.charged_ratio,
            ttft_ms=answer.report.timings.ttft_ms,
        )
        self._shelf.put(prompt_ids, reference)
        return reference

    @cached_property
    def ingest_cost(self) -> float:
        """Rows per chunk token that preparing the question's chunks takes."""
        identities = self._plan("none", PolicyOptions()).identities
        num_tokens = sum(len(i.token_ids) for i in identities)
        num_neighbour_rows = sum(len(i.prefix_ids) for i in identities if i.behind)
        return 1.0 + num_neighbour_rows / max(num_tokens, 1)

    def measure(self, arm: Arm, none_f1: float | None) -> Outcome:
        """Run one arm.

        Args:
            arm: The arm, under the cache's own preparation.
            none_f1: F1 of policy ``none`` where it is known; the arm ``none`` finds its own.
        """
        full, ran = self.full, self._run(arm)
        fidelity = ran.fidelity
        question = self._question
        score, full_score = (
            score_answer(text, question.answers, needs_all=question.needs_all_answers)
            for text in (ran.answer, full.text)
        )
        f1 = None if score is None else score.f1
        return Outcome(
            data=self._data,
            question_id=question.question_id,
            task=question.task,
            policy=arm.name,
            preparation=arm.preparation,
            ratio=arm.ratio,
            charged_ratio=ran.charged_ratio,
            prompt_tokens=full.prompt_tokens,
            kl_first=fidelity.kl_first,
            mean_kl=fidelity.mean_kl,
            agreement=fidelity.agreement,
            f1=f1,
            exact_match=None if score is None else score.exact_match,
            contains=None if score is None else score.contains,
            full_f1=None if full_score is None else full_score.f1,
            none_f1=f1 if arm.policy == "none" else none_f1,
            ttft_ms=ran.ttft_ms,
            full_ttft_ms=full.ttft_ms,
            answer=ran.answer,
            full_answer=full.text,
            ingest_cost=self.ingest_cost,
        )

    def _run(self, arm: Arm) -> _Ran:
        full, runtime = self.full, self._cache.runtime
        if arm.variant == "behind seen prefix":
            layout = self._plan("full", PolicyOptions()).layout
            run = run_behind_prefix(runtime, layout, self._num_seen_tokens)
            return _Ran(full.text, run.charged_ratio, run.ttft_ms, _EXACT)
        if arm.policy == "full":
            return _Ran(full.text, full.charged_ratio, full.ttft_ms, _EXACT)
        plan = self._plan(arm.policy, arm.options_for(runtime.model.runner.spec.num_layers))
        if arm.variant == "mask by row order":
            plan = replace(plan, mask_positions=bottom_right_positions)
        answer = self._generate(plan)
        report = answer.report
        fidelity = self._fidelity(plan, answer)
        return _Ran(answer.text, report.charged_ratio, report.timings.ttft_ms, fidelity)

    def _plan(self, policy: str, options: PolicyOptions) -> FusionPlan:
        how = AskOptions(policy=policy, policy_options=options, max_tokens=1)
        return self._cache.plan(self._question.question, self._documents, how)

    def _generate(self, plan: FusionPlan) -> Finished:
        lengths = self._lengths
        job = GenerationJob(
            plan, SamplingParams(), lengths.scored_tokens, num_kept_logits=lengths.compared_tokens
        )
        return self._cache.runtime.engine.submit(job).result()

    def _fidelity(self, plan: FusionPlan, answer: Finished) -> _Fidelity:
        full, num_tokens = self.full, self._lengths.compared_tokens
        logits = self._logits_behind_full_answer(plan, answer)
        return _Fidelity(
            kl_first=kl_divergence(full.logits[0], logits[0]),
            mean_kl=mean_kl(full.logits, logits),
            agreement=leading_agreement(full.token_ids[:num_tokens], answer.token_ids[:num_tokens]),
        )

    def _logits_behind_full_answer(self, plan: FusionPlan, answer: Finished) -> torch.Tensor:
        """Logits ``[N, vocab]`` of an arm behind the prompt and the full prefill's answer to it.

        The end token's distribution counts too: one row more than the answer has tokens.
        """
        forced_ids = self.full.forced_ids
        if answer.token_ids[: len(forced_ids)] == forced_ids:
            assert answer.step_logits is not None
            return answer.step_logits[: len(forced_ids) + 1]
        job = GenerationJob(plan.scoring(forced_ids), SamplingParams(), 1)
        return self._cache.runtime.engine.submit(job).result().scored_logits
