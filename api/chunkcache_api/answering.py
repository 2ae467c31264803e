"""A request's blocking work, as a producer of events for a worker. Knows no HTTP.

What requests have in common is here: begin, follow the answers, keep an account of it. What a
request of one form says, and how its answer looks, is the subclass'.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from chunkcache.engine.stream import Finished
from chunkcache.errors import ChunkCacheError
from chunkcache.fusion.plan import FusionPlan
from chunkcache.planning import AskOptions
from chunkcache.results import Answer, FinishReason, Timings, TokenLogprob
from chunkcache.streaming import StreamingAnswer
from chunkcache_api.errors import ModelNotFoundError
from chunkcache_api.plan_body import dry_run_body, plan_body
from chunkcache_api.prompt_body import prompt_body
from chunkcache_api.request_trace import RequestTrace
from chunkcache_api.service import Service
from chunkcache_api.workers import WorkerScope

MAX_SHOWN_CHARS: Final = 200


@dataclass(frozen=True)
class Started:
    """The request is accepted: it fits, its documents exist, the engine has it.

    Attributes:
        id: Its id.
        plan_ms: Milliseconds that planning took.
    """

    id: str
    plan_ms: float


@dataclass(frozen=True)
class TextPiece:
    """The next piece of an answer's text."""

    text: str
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class AnswerEnded:
    """One answer's end; other answers to the request may still grow."""

    index: int
    finish_reason: FinishReason


@dataclass(frozen=True)
class Completed:
    """The end; ``body`` is the response."""

    body: dict[str, Any]
    timings: Timings = field(default_factory=Timings)


class AnswerWork(ABC):
    """Answers one request. Its methods are producers: they run on a worker's thread.

    Args:
        service: Where to ask. It is made where the request's span is the current one.
        model: The model that the request names, if it names one.
        shows_prompt: Whether the response shows the prompt, piece by piece.

    Class attributes:
        endpoint: For the account of the request.
        id_prefix: What its id begins with.
        renamed_params: Names of the library's arguments, where the request calls them otherwise.

    Raises:
        ModelNotFoundError: The request names another model.
    """

    endpoint: ClassVar[str]
    id_prefix: ClassVar[str]
    renamed_params: ClassVar[Mapping[str, str]]

    def __init__(self, service: Service, model: str | None, *, shows_prompt: bool = False) -> None:
        if model is not None:
            check_model(service, model)
        self.service = service
        self._shows_prompt = shows_prompt
        self._trace = RequestTrace(service.tracer)
        self.created = int(time.time())

    def answer(self, scope: WorkerScope) -> None:
        """Emits :class:`Started`, pieces and ends of the answers, :class:`Completed`.

        Raises:
            ChunkCacheError: The request cannot be served, failed, or was cancelled.
        """
        try:
            self._answer(scope)
        except ChunkCacheError as error:
            self._name_field(error)
            raise

    def plan(self, scope: WorkerScope) -> None:
        """Emits :class:`Completed` with what would run. Errors as in :meth:`answer`."""
        try:
            plan, options = self.make_plan()
        except ChunkCacheError as error:
            self._name_field(error)
            raise
        scope.emit(Completed(dry_run_body(self.service, plan, options)))

    @abstractmethod
    def begin(self, scope: WorkerScope) -> StreamingAnswer:
        """Submit the request. Asks ``scope`` whether to go on behind what takes long."""

    @abstractmethod
    def make_plan(self) -> tuple[FusionPlan, AskOptions]:
        """What would run."""

    @abstractmethod
    def body(self, name: str, answers: Sequence[Answer]) -> dict[str, Any]:
        """The response."""

    def labels(self) -> dict[str, Any]:
        """What else the account of the request shows."""
        return {}

    def _answer(self, scope: WorkerScope) -> None:
        began_at = time.perf_counter()
        with self._trace.lookup() as found:
            growing = self.begin(scope)
            layout = growing.plan.layout
            found["chunks"], found["prompt_tokens"] = len(layout.chunks), layout.num_tokens
        scope.attach(growing)
        plan_ms = (time.perf_counter() - began_at) * 1e3
        name = self.id_prefix + growing.id.partition("_")[2]
        record = {
            "id": name,
            "object": "chunkcache.request",
            "endpoint": self.endpoint,
            "model": self.service.model_name,
            "created": self.created,
            **self.labels(),
            "plan": plan_body(growing.plan),
        }
        with self.service.requests.following(name, record) as done:
            scope.emit(Started(name, plan_ms))
            for index, event in growing.events():
                if isinstance(event, Finished):
                    scope.emit(AnswerEnded(index, event.finish_reason))
                else:
                    scope.emit(TextPiece(event.text, index, event.logprobs))
            answers = growing.answers()
            self._trace.answered(answers)
            body = self.body(name, answers)
            done(
                finish_reasons=[a.finish_reason for a in answers],
                usage=body["usage"],
                chunkcache=_without_text(body["chunkcache"]),
            )
            if self._shows_prompt:
                tokenizer = growing.runtime.model.tokenizer
                body["chunkcache"]["prompt"] = prompt_body(answers[0].report.use, tokenizer)
        scope.emit(Completed(body, answers[0].report.timings))

    def _name_field(self, error: ChunkCacheError) -> None:
        """The library names its own arguments; a request may call them otherwise."""
        if error.param is not None:
            error.param = self.renamed_params.get(error.param, error.param)


def check_model(service: Service, model: str) -> None:
    """Whether a model is the one that is served.

    Raises:
        ModelNotFoundError: It is another one.
    """
    if model != service.model_name:
        raise ModelNotFoundError(
            f"the model {model[:MAX_SHOWN_CHARS]!r} is not served here; this is "
            f"{service.model_name!r}",
            param="model",
        )


def _without_text(reuse: Mapping[str, Any]) -> dict[str, Any]:
    """A response's block ``chunkcache`` for the account: without the full prefill's answer."""
    verify = reuse["verify"]
    if verify is None:
        return dict(reuse)
    return {**reuse, "verify": {k: v for k, v in verify.items() if k != "full_answer"}}
