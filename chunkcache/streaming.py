"""An answer that is still growing, as its reader sees it."""

import secrets
import threading
from collections.abc import Iterator
from functools import partial

from chunkcache.engine.engine import Engine
from chunkcache.engine.request import GenerationJob
from chunkcache.engine.stream import AnswerStream, Finished, TextDelta
from chunkcache.fusion.plan import FusionPlan
from chunkcache.results import Answer, Citation, Verification
from chunkcache.runtime import Runtime
from chunkcache.verification import verification_jobs


def new_answer_id() -> str:
    """A server-made id that nobody can guess."""
    return f"ans_{secrets.token_hex(12)}"


class StreamingAnswer:
    """An answer that is still growing. Leaving its context stops it.

    Args:
        stream: The engine's side.
        job: What was asked of the engine.
        answer_id: Id of the answer.
        runtime: What answers.
        is_verified: Whether the answer is to be verified.

    Attributes:
        id: Server-made id of the answer.
        runtime: What answers; not the one that serves any more, if the model was reloaded since.
        plan: What was decided before any model work.
    """

    def __init__(
        self,
        stream: AnswerStream,
        job: GenerationJob,
        *,
        answer_id: str,
        runtime: Runtime,
        is_verified: bool = False,
    ) -> None:
        self._stream = stream
        self._job = job
        self._is_verified = is_verified
        self._lock = threading.Lock()
        self._current = stream
        self._is_cancelled = False
        self._verification: Verification | None = None
        self.id = answer_id
        self.runtime = runtime

    @property
    def plan(self) -> FusionPlan:
        """What was decided before any model work."""
        return self._job.plan

    def __iter__(self) -> Iterator[str]:
        """Text pieces; joined, they are the answer's text.

        Raises:
            ChunkCacheError: The request failed, or was cancelled.
        """
        return iter(self._stream)

    def __enter__(self) -> "StreamingAnswer":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Stop, the verification included; harmless after the end."""
        with self._lock:
            self._is_cancelled = True
            current = self._current
        current.cancel()

    def events(self) -> Iterator[tuple[int, TextDelta | Finished]]:
        """What has not been read yet of every answer, with its index, until all have ended.

        Raises:
            ChunkCacheError: The request failed, or was cancelled.
        """
        return self._stream.events()

    def finished(self) -> Finished:
        """Wait for the only answer's end, without its verification.

        Raises:
            ChunkCacheError: The request failed, or was cancelled.
        """
        return self._stream.result()

    def answer(self) -> Answer:
        """Wait for the end of the only answer, as an :class:`~chunkcache.results.Answer`.

        Where verification was asked for, this is where the full prefill runs.

        Raises:
            ChunkCacheError: The request or its verification failed, or was cancelled.
        """
        (answer,) = self.answers()
        return answer

    def answers(self) -> tuple[Answer, ...]:
        """Wait for the end of every answer. Otherwise as :meth:`answer`."""
        ends = self._stream.results()
        if self._is_verified and self._verification is None:
            self._verification = self._verify(ends[0], self.runtime.engine)
        return tuple(self._answer_of(end) for end in ends)

    def _answer_of(self, finished: Finished) -> Answer:
        return Answer(
            id=self.id,
            model=self.runtime.model.runner.name,
            text=finished.text,
            token_ids=finished.token_ids,
            finish_reason=finished.finish_reason,
            report=finished.report,
            citations=_citations(self.plan),
            verification=self._verification,
            logprobs=finished.logprobs,
        )

    def _verify(self, finished: Finished, engine: Engine) -> Verification:
        jobs = verification_jobs(self._job, finished)
        wanted = next(jobs)
        while True:
            ended = self._follow(engine.submit(wanted))
            try:
                # The figures are tensor work, which is the engine's thread's alone.
                wanted = engine.call(partial(jobs.send, ended)).result()
            except StopIteration as stop:
                return stop.value

    def _follow(self, stream: AnswerStream) -> Finished:
        """Wait for further work, which :meth:`cancel` ends from now on."""
        with self._lock:
            self._current = stream
            is_cancelled = self._is_cancelled
        if is_cancelled:
            stream.cancel()
        return stream.result()


def _citations(plan: FusionPlan) -> tuple[Citation, ...]:
    indexes: dict[str, list[int]] = {}
    for segment in plan.layout.chunks:
        assert segment.chunk is not None
        indexes.setdefault(segment.chunk.document_id, []).append(segment.chunk.chunk_index)
    return tuple(Citation(name, tuple(found)) for name, found in indexes.items())
