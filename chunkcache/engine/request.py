"""One request inside the engine: its plan, its pages, its growing answer."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace

import torch

from chunkcache.engine.decode import DecodeRow
from chunkcache.engine.sampling import Sampler, SamplingParams
from chunkcache.engine.stream import AnswerStream, Finished, TextDelta
from chunkcache.errors import RequestCancelledError
from chunkcache.fusion.fuse import FusionOutcome
from chunkcache.fusion.plan import FusionPlan
from chunkcache.model.tokenising import TextTokenizer
from chunkcache.pages import PageLease
from chunkcache.results import FinishReason, ReuseWarning

OnEnd = Callable[[Finished | BaseException], None]
"""Told of a request's end, on the engine's thread; must be quick and must not fail."""


@dataclass(frozen=True)
class GenerationJob:
    """What is asked of the engine.

    Attributes:
        plan: The fusion.
        sampling: How tokens are drawn.
        max_tokens: Largest number of answer tokens, at least 1.
        num_kept_logits: Of how many of its first steps the answer comes with the logits.
    """

    plan: FusionPlan
    sampling: SamplingParams
    max_tokens: int
    num_kept_logits: int = 0

    def __post_init__(self) -> None:
        """Growing an answer behind a given one would make two of them."""
        assert not self.plan.parts.answer_ids or self.max_tokens == 1


@dataclass
class ActiveRequest:
    """A request in flight. Only the engine's thread touches it, after construction.

    Grouped by who sets it: construction; the engine at the start of the fusion (``pages``,
    ``steps``, ``started_at``); the engine at its end (``outcome`` and what follows).
    """

    job: GenerationJob
    stream: AnswerStream
    tokenizer: TextTokenizer
    eos_token_ids: frozenset[int]
    on_end: OnEnd = lambda end: None
    submitted_at: float = field(default_factory=time.perf_counter)

    pages: PageLease | None = None
    steps: Generator[None, None, torch.Tensor] | None = None
    started_at: float = 0.0

    outcome: FusionOutcome | None = None
    first_token_at: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    warnings: list[ReuseWarning] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Give the request a sampler and a decoder of its own."""
        self._sampler = Sampler(self.job.sampling)
        self._decoder = self.tokenizer.stream()
        self._text: list[str] = []
        self._logits: list[torch.Tensor] = []
        self._last_token_at = 0.0
        self._gaps_ms: list[float] = []

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
        token_id = self._sampler.draw(logits)
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
        piece = self._decoder.push(token_id)
        self._text.append(piece)
        self.stream.publish(TextDelta(token_id, piece))
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
        self._text.append(self._decoder.finish())
        self._end(
            Finished(
                text="".join(self._text),
                token_ids=tuple(self.token_ids),
                finish_reason=reason,
                report=replace(
                    report, timings=timings, warnings=(*report.warnings, *self.warnings)
                ),
                first_logits=self.outcome.logits,
                given_logits=self.outcome.answer_logits,
                step_logits=torch.stack(self._logits) if self._logits else None,
                gaps_ms=tuple(self._gaps_ms),
                parts=self.outcome.parts,
            )
        )

    def fail(self, error: BaseException) -> None:
        """Publish a failure; everything has been given back."""
        self._end(error)

    def cancel(self) -> None:
        """End a request whose reader gave up."""
        self.fail(RequestCancelledError("the request was cancelled"))

    def _end(self, end: Finished | BaseException) -> None:
        # Whoever counts has counted by the time that the reader knows.
        self.on_end(end)
        self.stream.publish(end)

    def release(self) -> None:
        """Give pages and leases back; idempotent."""
        if self.steps is not None:
            self.steps.close()
            self.steps = None
        if self.pages is not None:
            self.pages.release()
            self.pages = None
