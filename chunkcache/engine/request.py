"""One request inside the engine: its plan, its pages, its growing answer."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from chunkcache.engine.answer_text import AnswerText
from chunkcache.engine.constraint import MakeConstraint
from chunkcache.engine.decode import DecodeRow
from chunkcache.engine.logprobs import token_logprob
from chunkcache.engine.sampling import Sampler, SamplingParams
from chunkcache.engine.stream import AnswerStream, Finished, TextDelta
from chunkcache.errors import RequestCancelledError
from chunkcache.fusion.fuse import FusionOutcome
from chunkcache.fusion.plan import FusionPlan
from chunkcache.fusion.ready import NOTHING_READY, ReadyTokens
from chunkcache.identity import TenantNamespace
from chunkcache.model.tokenising import TextTokenizer
from chunkcache.pages import PageLease
from chunkcache.results import FinishReason, ReuseWarning, TokenLogprob

NOBODY: Final = TenantNamespace(b"")
"""Owner of work of our own."""

OnEnd = Callable[[Finished | BaseException], None]
"""Told of each answer's end, or once of the request's failure, on the engine's thread; must be
quick and must not fail."""


@dataclass(frozen=True)
class GenerationJob:
    """What is asked of the engine.

    Attributes:
        plan: The fusion.
        sampling: How tokens are drawn.
        max_tokens: Largest number of answer tokens, at least 1.
        num_kept_logits: Of how many of its first steps the answer comes with the logits.
        num_answers: Answers that are drawn behind one fusion.
        stop: Strings that end an answer, and are not part of it.
        num_top_logprobs: How many of the likeliest tokens come with each token; None asks for no
            log probabilities.
        constraint: Makes what an answer has to keep to, if it has to.
        owner: Whose it is: owners take turns, and only the pages of one's own prompts are reused.
        reuses_prompts: Whether it may start from pages of finished prompts, and leave its own: not
            where a full prefill is timed or checked against.
    """

    plan: FusionPlan
    sampling: SamplingParams
    max_tokens: int
    num_kept_logits: int = 0
    num_answers: int = 1
    stop: tuple[str, ...] = ()
    num_top_logprobs: int | None = None
    constraint: MakeConstraint | None = None
    owner: TenantNamespace = NOBODY
    reuses_prompts: bool = True

    def __post_init__(self) -> None:
        """Growing an answer behind a given one would make two of them."""
        assert not self.plan.parts.answer_ids or self.max_tokens == 1
        assert self.num_answers >= 1

    def alone(self) -> "GenerationJob":
        """The first of its answers, as if no other had been asked for."""
        return replace(self, num_answers=1)


@dataclass
class ActiveRequest:
    """One answer in flight. Only the engine's thread touches it, after construction.

    Grouped by who sets it: construction; the engine at the start of the fusion (``pages``,
    ``ready``, ``repeated``, ``steps``, ``started_at``; of further answers, only ``pages``, which are empty so far); the
    engine at its end (``outcome`` and what follows).

    Attributes:
        index: Which answer to the request. The first is fused; the others branch off from it.
        others: Of the first, the other answers, until they have branched off.
        ready: Tokens at the front whose keys and values were in the pages from the start.
        repeated: What the prompt came to before, where all of it was.
    """

    job: GenerationJob
    stream: AnswerStream
    tokenizer: TextTokenizer
    eos_token_ids: frozenset[int]
    on_end: OnEnd = lambda end: None
    index: int = 0
    others: list["ActiveRequest"] = field(default_factory=list)
    submitted_at: float = field(default_factory=time.perf_counter)

    pages: PageLease | None = None
    ready: ReadyTokens = NOTHING_READY
    repeated: FusionOutcome | None = None
    steps: Generator[None, None, torch.Tensor] | None = None
    started_at: float = 0.0

    outcome: FusionOutcome | None = None
    first_token_at: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    warnings: list[ReuseWarning] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Give the answer a sampler and a decoder of its own."""
        self._sampler = Sampler(self.job.sampling.of_answer(self.index))
        self._answer = AnswerText(self.tokenizer.stream(), self.job.stop)
        self._constraint = self.job.constraint() if self.job.constraint is not None else None
        self._logits: list[torch.Tensor] = []
        self._last_token_at = 0.0
        self._gaps_ms: list[float] = []
        self._has_left = False

    @property
    def num_answers(self) -> int:
        """This answer, and those that have not branched off from it yet."""
        return 1 + len(self.others)

    @property
    def num_slots(self) -> int:
        """Token slots the request may need: its prompt and all but the last answer token."""
        return self.job.plan.layout.num_tokens + self.job.max_tokens

    def fuse(
        self, steps: Generator[None, None, FusionOutcome]
    ) -> Generator[None, None, torch.Tensor]:
        """The fusion's steps; keeps its outcome and returns the logits behind the prompt."""
        self.outcome = yield from steps
        return self.outcome.logits

    def repeat(self) -> Generator[None, None, torch.Tensor]:
        """Steps of a prompt that is in the pages to its end: none; otherwise as :meth:`fuse`."""
        assert self.repeated is not None
        self.outcome = self.repeated
        yield from ()
        return self.outcome.logits

    @property
    def sequence_ids(self) -> tuple[int, ...]:
        """The prompt that was run and the answer so far."""
        assert self.outcome is not None
        return (*self.outcome.layout.token_ids, *self.token_ids)

    def next_row(self) -> DecodeRow:
        """The step that produces the next token."""
        assert self.pages is not None
        assert self.outcome is not None
        position = self.outcome.layout.num_tokens + len(self.token_ids) - 1
        return DecodeRow(self.token_ids[-1], position, self.pages)

    def take(self, logits: torch.Tensor) -> FinishReason | None:
        """Draw a token, publish its text, say whether the answer ends with it.

        Args:
            logits: fp32 ``[vocab]``.
        """
        constraint = self._constraint
        allowed = logits if constraint is None else constraint.masked(logits)
        token_id = self._sampler.draw(allowed)
        if len(self._logits) < self.job.num_kept_logits:
            self._logits.append(logits)
        now = time.perf_counter()
        if not self.first_token_at:
            self.first_token_at = now
        else:
            self._gaps_ms.append((now - self._last_token_at) * 1e3)
        self._last_token_at = now
        if token_id in self.eos_token_ids:
            return "stop"
        self.token_ids.append(token_id)
        num_top = self.job.num_top_logprobs
        logprob = None if num_top is None else token_logprob(logits, token_id, num_top)
        self._publish(*self._answer.push(token_id, logprob))
        if self._answer.is_stopped or (constraint is not None and constraint.advance(token_id)):
            return "stop"
        return "length" if len(self.token_ids) >= self.job.max_tokens else None

    def finish(self, reason: FinishReason) -> None:
        """Publish the end; everything has been given back."""
        assert self.outcome is not None
        now = time.perf_counter()
        report = self.outcome.report
        timings = replace(
            report.timings,
            queue_ms=(self.started_at - self.submitted_at) * 1e3,
            ttft_ms=(self.first_token_at - self.submitted_at) * 1e3,
            decode_ms=(now - self.first_token_at) * 1e3,
        )
        self._publish(*self._answer.finish())
        self._end(
            Finished(
                text=self._answer.text,
                token_ids=tuple(self.token_ids),
                finish_reason="stop" if self._answer.is_stopped else reason,
                report=replace(
                    report, timings=timings, warnings=(*report.warnings, *self.warnings)
                ),
                first_logits=self.outcome.logits,
                given_logits=self.outcome.answer_logits,
                step_logits=torch.stack(self._logits) if self._logits else None,
                gaps_ms=tuple(self._gaps_ms),
                parts=self.outcome.parts,
                index=self.index,
                logprobs=self._answer.logprobs,
            )
        )

    def fail(self, error: BaseException) -> None:
        """Publish a failure; everything has been given back."""
        self._end(error)

    def cancel(self) -> None:
        """End a request whose reader gave up."""
        self.fail(RequestCancelledError("the request was cancelled"))

    def _end(self, end: Finished | BaseException) -> None:
        # Whoever counts has counted by the time that the reader knows; a failure counts once.
        if isinstance(end, Finished) or not self.stream.has_failed:
            self.on_end(end)
        self.stream.publish(self.index, end)

    def _publish(self, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        if text or logprobs:
            self.stream.publish(self.index, TextDelta(text, logprobs))

    def leave(self) -> bool:
        """Count it as ended, answers not yet branched off included; whether its request is.

        It counts once: an answer whose end cannot be made fails behind it.
        """
        if self._has_left:
            return False
        self._has_left = True
        return self.stream.leave(self.num_answers)

    def release(self) -> None:
        """Give pages and leases back, those of answers not yet branched off included; idempotent."""
        for other in self.others:
            other.release()
        if self.steps is not None:
            self.steps.close()
            self.steps = None
        if self.pages is not None:
            self.pages.release()
            self.pages = None
