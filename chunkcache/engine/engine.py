"""The engine: one thread that owns the model.

Requests and tasks come by a queue. The thread alternates one step of the fusion at hand with one
decode tile for the answers that are growing, so that a long prefill does not stall streams. A
fusion's steps have fixed boundaries, each request is fused alone, and decoding has a fixed shape:
an answer's bits do not depend on the load. What nobody waits for runs when nothing else is there.
"""

import queue
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import replace
from typing import Final, TypeVar

import structlog
import torch

from chunkcache.engine.decode import DecodeTile
from chunkcache.engine.idle import IdleCounts, IdleLane, IdleWork
from chunkcache.engine.kept_pages import KeptPages
from chunkcache.engine.kept_prompts import KeptPrompts
from chunkcache.engine.page_reserve import PageReserve
from chunkcache.engine.request import ActiveRequest, GenerationJob, OnEnd
from chunkcache.engine.solo import SoloRunner
from chunkcache.engine.stream import AnswerStream, Finished
from chunkcache.engine.tasks import Task, TaskLane, promised, promised_steps
from chunkcache.engine.waiting import WaitingRequests
from chunkcache.errors import (
    ChunkCacheError,
    ContextLengthExceededError,
    DrainingError,
    EngineFailedError,
    InvalidValueError,
    QueueFullError,
)
from chunkcache.failure_logs import traceback_text
from chunkcache.fusion.fuse import LoadEntry
from chunkcache.fusion.template_entries import LoadTemplate
from chunkcache.model.runner import ModelRunner
from chunkcache.model.tokenising import TextTokenizer
from chunkcache.pages import PagePool

MAX_IDLE_WORK: Final = 32
"""Pieces of work that may wait for an idle engine."""

Result = TypeVar("Result")

_log = structlog.get_logger("chunkcache.engine")


class Engine:
    """Owns the model thread.

    Args:
        runner: The model; only the engine's thread runs it from now on.
        tokenizer: Turns answers into text.
        pool: Pages for the requests in flight.
        load_entry: Finds or computes entries of chunks; called on the engine's thread.
        load_template: Finds or computes entries of template text; likewise.
        kept: Pages of finished prompts in the pool.
        prompts: Which of them a prompt may begin with.
        tile_rows: Rows of the decode tile, and so answers that grow at once.
        max_queued: Requests that may wait.
        max_queued_tokens: Prompt tokens of requests that may wait, in all.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: TextTokenizer,
        pool: PagePool,
        load_entry: LoadEntry,
        load_template: LoadTemplate,
        kept: KeptPages,
        prompts: KeptPrompts,
        *,
        tile_rows: int,
        max_queued: int,
        max_queued_tokens: int,
    ) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._pool = pool
        self._tile = DecodeTile(runner, pool, tile_rows)
        self._solo = SoloRunner(runner, tokenizer, pool, load_entry, load_template, self._tile)
        self._kept = kept
        self._prompts = prompts
        self._reserve = PageReserve(pool, self._solo, kept, prompts)
        self._idle = IdleLane(MAX_IDLE_WORK)
        self._max_queued = max_queued
        self._inbox: queue.SimpleQueue[ActiveRequest | Task | None] = queue.SimpleQueue()
        self._tasks = TaskLane()
        self._waiting = WaitingRequests(max_queued_tokens)
        self._fusing: ActiveRequest | None = None
        self._decoding: list[ActiveRequest] = []
        self._num_open = 0
        self._lock = threading.Lock()
        self._is_draining = False
        self._thread = threading.Thread(target=self._run, name="chunkcache-engine", daemon=True)
        self._thread.start()

    @property
    def num_open_requests(self) -> int:
        """Requests submitted and not yet ended."""
        with self._lock:
            return self._num_open

    @property
    def num_queued_requests(self) -> int:
        """Open requests that wait for the engine."""
        fusing = self._fusing
        begun = {id(r.stream) for r in [*self._decoding, *([] if fusing is None else [fusing])]}
        return max(0, self.num_open_requests - len(begun))

    @property
    def idle_counts(self) -> IdleCounts:
        """What became of work for when the engine is idle."""
        return self._idle.counts()

    def check_fits(self, num_prompt_tokens: int) -> int:
        """How many answer tokens a prompt leaves room for.

        Raises:
            ContextLengthExceededError: None; the message names the limit and the size.
        """
        limit = min(self._runner.spec.max_positions, self._pool.num_pages * self._pool.page_tokens)
        if num_prompt_tokens >= limit:
            raise ContextLengthExceededError(
                f"the prompt has {num_prompt_tokens} tokens; with at least one answer token it "
                f"must fit {limit}",
                param="document_ids",
            )
        return limit - num_prompt_tokens

    def submit(self, job: GenerationJob, on_end: OnEnd = lambda end: None) -> AnswerStream:
        """Queue a request; ``max_tokens`` is cut to what the context leaves room for.

        Args:
            job: What is asked.
            on_end: Told of its end before its reader is; not where it is refused.

        Raises:
            ContextLengthExceededError: It can never fit.
            QueueFullError: Too many requests wait, or too many tokens.
            DrainingError: The engine is stopping.
            InvalidValueError: ``max_tokens`` is less than 1, or more answers are asked for than
                grow at once.
        """
        if job.max_tokens < 1:
            raise InvalidValueError("max_tokens is less than 1", param="max_tokens")
        if job.num_answers > self._tile.num_rows:
            raise InvalidValueError(
                f"{job.num_answers} answers to one request, over {self._tile.num_rows}", param="n"
            )
        job = self._fitted(job)
        stream = AnswerStream(lambda: self._inbox.put(lambda: None), job.num_answers)
        first, *others = (
            ActiveRequest(job, stream, self._tokenizer, self._runner.eos_token_ids, on_end, i)
            for i in range(job.num_answers)
        )
        first.others = others
        self._reserve.check(first)
        with self._lock:
            self._check_accepting()
            if self._num_open >= self._max_queued + self._tile.num_rows:
                raise QueueFullError(f"{self._num_open} requests are in flight; try again later")
            self._waiting.announce(first)
            self._num_open += 1
            self._inbox.put(first)
        return stream

    def call(self, task: Callable[[], Result]) -> "Future[Result]":
        """Run a callable on the engine's thread, between steps.

        Raises:
            DrainingError: The engine is stopping.
        """
        return self._enqueue(*promised(task))

    def call_steps(self, task: Callable[[], Generator[None, None, Result]]) -> "Future[Result]":
        """Run work on the engine's thread, its steps in turn with those of requests.

        Tasks run one after the other, in the order in which they came.

        Raises:
            DrainingError: The engine is stopping.
        """
        return self._enqueue(*promised_steps(task))

    def _enqueue(self, task: Task, future: "Future[Result]") -> "Future[Result]":
        with self._lock:
            self._check_accepting()
            self._inbox.put(task)
        return future

    def when_idle(self, work: IdleWork) -> None:
        """Have work done when nothing is queued or running.

        A request that comes meanwhile goes first, at the work's next step; if it needs the work's
        pages, the work begins anew later. The backlog is bounded: what has waited longest is
        dropped, and so is all of it when the engine stops. Never refused.
        """
        self._inbox.put(lambda: self._idle.add(work))

    def solo_steps(self, job: GenerationJob) -> Generator[None, None, Finished]:
        """A request as steps of work for when the engine is idle; the same bits as any other's.

        Raises:
            ContextLengthExceededError: It can never fit.
            ChunkCacheError: The request failed.
        """
        return self._solo.steps(self._fitted(job))

    def is_engine_thread(self) -> bool:
        """Whether the caller runs on the engine's thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Finish what was accepted, then stop; idempotent."""
        with self._lock:
            if not self._is_draining:
                self._is_draining = True
                self._inbox.put(None)
        self._thread.join()
        self._kept.clear()
        self._pool.check_integrity()

    def _check_accepting(self) -> None:
        if self._is_draining:
            raise DrainingError("the engine is stopping")

    def _fitted(self, job: GenerationJob) -> GenerationJob:
        room = self.check_fits(job.plan.layout.num_tokens)
        return job if job.max_tokens <= room else replace(job, max_tokens=room)

    @torch.inference_mode()
    def _run(self) -> None:
        is_stopping = False
        while True:
            has_work = self._is_busy or self._idle.has_work
            is_stopping |= self._accept(wait=not has_work and not is_stopping)
            self._drop_cancelled()
            if self._is_busy:
                self._tasks.step()
                self._advance_fusion()
                self._advance_decoding()
            elif not is_stopping:
                if self._idle.has_work:
                    self._idle.step()
            elif self._inbox.empty():
                self._idle.clear()
                return

    @property
    def _is_busy(self) -> bool:
        """Whether somebody waits for the engine."""
        return bool(
            self._tasks.has_work or self._waiting or self._decoding or self._fusing is not None
        )

    def _accept(self, *, wait: bool) -> bool:
        """Take what has come in; returns whether the end was announced."""
        while wait or not self._inbox.empty():
            wait = False
            item = self._inbox.get()
            if item is None:
                return True
            if isinstance(item, ActiveRequest):
                self._waiting.append(item)
            else:
                self._tasks.add(item)
        return False

    def _drop_cancelled(self) -> None:
        if self._fusing is not None and self._fusing.stream.is_cancelled:
            request, self._fusing = self._fusing, None
            self._end(request, request.cancel)
        for request in self._waiting.take_cancelled():
            self._end(request, request.cancel)
        for request in [r for r in self._decoding if r.stream.is_cancelled]:
            self._decoding.remove(request)
            self._end(request, request.cancel)

    def _advance_fusion(self) -> None:
        if self._fusing is None:
            self._start_next()
        request = self._fusing
        if request is None:
            return
        assert request.steps is not None
        try:
            next(request.steps)
            return
        except StopIteration as stop:
            logits = stop.value
        except Exception as error:  # the request fails, the engine goes on
            self._fusing = None
            self._fail(request, error)
            return
        self._fusing = request.steps = None
        self._guarded(request, lambda: self._begin_decoding(request, logits))

    def _begin_decoding(self, request: ActiveRequest, logits: torch.Tensor) -> None:
        job = request.job
        if job.reuses_prompts and not request.token_ids:
            assert request.pages is not None
            assert request.outcome is not None
            self._prompts.keep(job.plan, job.owner, request.pages, request.outcome)
        branches = self._solo.branch(request)
        self._decoding += branches
        for branch in branches:
            self._guarded(branch, lambda b=branch: self._take(b, logits))

    def _start_next(self) -> None:
        """Begin the fusion, or the rerun, at the head of the queue, if there is room for it."""
        if not self._waiting:
            return
        request = self._waiting.head()
        if len(self._decoding) + request.num_answers > self._tile.num_rows:
            return
        if request.pages is not None:
            self._fusing = self._waiting.take()
            self._solo.begin_again(request)
            return
        try:
            has_pages = self._reserve.take(request)
            if not has_pages and self._idle.give_way():
                has_pages = self._reserve.take(request)
        except Exception as error:  # the request fails, the engine goes on
            self._fail(self._waiting.take(), error)
            return
        if not has_pages:
            return
        self._waiting.take()
        self._solo.begin(request)
        self._fusing = request

    def _advance_decoding(self) -> None:
        self._set_aside_reruns()
        if not self._decoding:
            return
        requests = list(self._decoding)
        try:
            logits = self._tile.step([r.next_row() for r in requests])
        except Exception as error:  # every answer of the tile fails, the engine goes on
            for request in requests:
                self._decoding.remove(request)
                self._fail(request, error)
            return
        for request, row in zip(requests, logits, strict=True):
            self._guarded(request, lambda r=request, x=row: self._take(r, x))

    def _set_aside_reruns(self) -> None:
        """Answers whose next token changes the rotation go to the head of the queue."""
        for request in [r for r in self._decoding if self._solo.must_begin_again(r)]:
            self._decoding.remove(request)
            self._waiting.put_first(request)

    def _take(self, request: ActiveRequest, logits: torch.Tensor) -> None:
        reason = request.take(logits)
        if reason is not None:
            self._decoding.remove(request)
            self._end(request, lambda: request.finish(reason))

    def _guarded(self, request: ActiveRequest, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # the request fails, the engine goes on
            if request in self._decoding:
                self._decoding.remove(request)
            self._fail(request, error)

    def _fail(self, request: ActiveRequest, error: Exception) -> None:
        if not isinstance(error, ChunkCacheError):
            _log.error("request_failed", exception=traceback_text(error))
            failure = EngineFailedError("the request failed inside the engine; see the log")
            failure.__cause__ = error
            error = failure
        self._end(request, lambda: request.fail(error))

    def _end(self, request: ActiveRequest, action: Callable[[], None]) -> None:
        """Give everything back, then let the reader know."""
        request.release()
        if request.leave():
            with self._lock:
                self._num_open -= 1
        action()
