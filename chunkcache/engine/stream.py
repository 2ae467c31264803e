"""The way of an answer from the engine's thread to its reader."""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from chunkcache.fusion.plan import PromptParts
from chunkcache.results import FinishReason, FusionReport, TokenLogprob


@dataclass(frozen=True)
class TextDelta:
    """More of an answer.

    Attributes:
        text: Text that became certain; empty inside a character.
        logprobs: Of the tokens that became certain with it, where they were asked for.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Finished:
    """An answer's end.

    Attributes:
        text: The whole answer; the deltas joined.
        token_ids: Its tokens, the end token left out, those of a stop string included.
        finish_reason: Why it ended.
        report: What was reused and run.
        first_logits: fp32 ``[vocab]`` behind the prompt's last token.
        given_logits: fp32 ``[A, vocab]`` behind the tokens of the plan's own answer, if it has one.
        step_logits: fp32 ``[N, vocab]`` that the first tokens (and the end token) were drawn from,
            as many as the job asked for; None where it asked for none.
        gaps_ms: Milliseconds from each token to the next.
        parts: The prompt that was run.
        index: Which answer to it, from 0.
        logprobs: Of its tokens, where they were asked for.
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
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def scored_logits(self) -> torch.Tensor:
        """fp32 ``[A + 1, vocab]`` behind the prompt and each token of the plan's own answer."""
        return torch.cat([self.first_logits[None], self.given_logits])


Event = TextDelta | Finished | BaseException


class AnswerStream:
    """Events of the answers to one request; iterate for text pieces, or wait for the whole.

    A reader that goes away calls :meth:`cancel` (leaving the context manager does): the engine
    frees the request's pages at its next step. One answer's failure is the request's.

    Args:
        on_cancel: Called once when the reader gives up.
        num_answers: Answers to the request.

    Attributes:
        has_failed: Whether an answer has failed; the others are given up then.
    """

    def __init__(self, on_cancel: Callable[[], None], num_answers: int = 1) -> None:
        self._events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._on_cancel = on_cancel
        self._num_answers = self._num_growing = num_answers
        self.has_failed = False
        self._cancelled = threading.Event()
        self._finished: dict[int, Finished] = {}
        self._failure: BaseException | None = None
        self._sent_chars = 0

    def publish(self, index: int, event: Event) -> None:
        """Called by the engine's thread."""
        if isinstance(event, BaseException):
            self.has_failed = True
            self._cancelled.set()
        self._events.put((index, event))

    def leave(self, num_answers: int) -> bool:
        """Called by the engine's thread as answers end; whether none is left."""
        self._num_growing -= num_answers
        assert self._num_growing >= 0
        return self._num_growing == 0

    @property
    def is_cancelled(self) -> bool:
        """Whether the reader gave up, or an answer has failed."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Stop the answers; harmless after their end and when repeated."""
        if not self._cancelled.is_set():
            self._cancelled.set()
            self._on_cancel()

    def __enter__(self) -> "AnswerStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def events(self) -> Iterator[tuple[int, TextDelta | Finished]]:
        """What has not been read yet of every answer, with its index, until all have ended.

        Raises:
            ChunkCacheError: The request failed, or was cancelled.
        """
        while len(self._finished) < self._num_answers:
            if self._failure is not None:
                raise self._failure
            index, event = self._events.get()
            if isinstance(event, BaseException):
                self._failure = event
                continue
            if isinstance(event, Finished):
                self._finished[index] = event
            yield index, event

    def __iter__(self) -> Iterator[str]:
        """Text pieces of the only answer as they become certain; joined, they are its text.

        Raises:
            ChunkCacheError: The request failed, or was cancelled.
        """
        for _, event in self.events():
            if isinstance(event, TextDelta) and event.text:
                self._sent_chars += len(event.text)
                yield event.text
        rest = self.result().text[self._sent_chars :]
        if rest:
            self._sent_chars += len(rest)
            yield rest

    def result(self) -> Finished:
        """Wait for the end of the only answer.

        Raises:
            ChunkCacheError: The request failed, or was cancelled.
        """
        (finished,) = self.results()
        return finished

    def results(self) -> tuple[Finished, ...]:
        """Wait for the end of every answer.

        Raises:
            ChunkCacheError: The request failed, or was cancelled.
        """
        for _ in self.events():
            pass
        return tuple(self._finished[i] for i in range(self._num_answers))
