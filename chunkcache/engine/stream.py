"""The way of an answer from the engine's thread to its reader."""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from chunkcache.fusion.plan import PromptParts
from chunkcache.results import FinishReason, FusionReport


@dataclass(frozen=True)
class TextDelta:
    """One more token of an answer.

    Attributes:
        token_id: The token.
        text: Text that became certain with it; empty inside a character.
    """

    token_id: int
    text: str


@dataclass(frozen=True)
class Finished:
    """An answer's end.

    Attributes:
        text: The whole answer; the deltas joined, plus what the last characters needed.
        token_ids: Its tokens, the end token left out.
        finish_reason: Why it ended.
        report: What was reused and run.
        first_logits: fp32 ``[vocab]`` behind the prompt's last token.
        given_logits: fp32 ``[A, vocab]`` behind the tokens of the plan's own answer, if it has one.
        step_logits: fp32 ``[N, vocab]`` that the first tokens (and the end token) were drawn from,
            as many as the job asked for; None where it asked for none.
        gaps_ms: Milliseconds from each token to the next.
        parts: The prompt that was run.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    report: FusionReport
    first_logits: torch.Tensor
    given_logits: torch.Tensor
    step_logits: torch.Tensor | None
    gaps_ms: tuple[float, ...]
    parts: PromptParts

    @property
    def scored_logits(self) -> torch.Tensor:
        """fp32 ``[A + 1, vocab]`` behind the prompt and each token of the plan's own answer."""
        return torch.cat([self.first_logits[None], self.given_logits])


Event = TextDelta | Finished | BaseException


class AnswerStream:
    """Events of one answer; iterate for text pieces, or wait for the whole.

    A reader that goes away calls :meth:`cancel` (leaving the context manager does): the engine
    frees the request's pages at its next step.
    """

    def __init__(self, on_cancel: Callable[[], None]) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._on_cancel = on_cancel
        self._cancelled = threading.Event()
        self._outcome: Finished | BaseException | None = None
        self._sent_chars = 0

    def publish(self, event: Event) -> None:
        """Called by the engine's thread."""
        self._events.put(event)

    @property
    def is_cancelled(self) -> bool:
        """Whether the reader gave up."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Stop the answer; harmless after its end and when repeated."""
        if not self._cancelled.is_set():
            self._cancelled.set()
            self._on_cancel()

    def __enter__(self) -> "AnswerStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __iter__(self) -> Iterator[str]:
        """Text pieces as they become certain; joined, they are the answer's text.

        Raises:
            ChunkCacheError: The request failed, or was cancelled.
        """
        while self._outcome is None:
            event = self._events.get()
            if isinstance(event, TextDelta):
                if event.text:
                    self._sent_chars += len(event.text)
                    yield event.text
            else:
                self._outcome = event
        rest = self.result().text[self._sent_chars :]
        if rest:
            self._sent_chars += len(rest)
            yield rest

    def result(self) -> Finished:
        """Wait for the end.

        Raises:
            ChunkCacheError: The request failed, or was cancelled.
        """
        while self._outcome is None:
            event = self._events.get()
            if not isinstance(event, TextDelta):
                self._outcome = event
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome
