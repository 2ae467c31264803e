"""A query's blocking work, as a producer of events for a worker. Knows no HTTP."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from chunkcache.errors import ChunkCacheError, UnsupportedParameterError
from chunkcache.fusion.plan import FusionPlan
from chunkcache.planning import AskOptions, DocumentRef
from chunkcache_api.errors import ModelNotFoundError
from chunkcache_api.schemas.query import QueryRequest, ReuseOptions
from chunkcache_api.service import Service
from chunkcache_api.workers import WorkerScope


@dataclass(frozen=True)
class Started:
    """The request is accepted: it fits, its documents exist, the engine has it."""

    id: str


@dataclass(frozen=True)
class TextPiece:
    """The next piece of the answer's text."""

    text: str


@dataclass(frozen=True)
class Completed:
    """The end; ``body`` is the response."""

    body: dict[str, Any]


class QueryWork:
    """Answers one query. Its methods are producers: they run on a worker's thread.

    Args:
        service: Where to ask.
        request: What is asked.

    Raises:
        ModelNotFoundError: The request names another model.
        UnsupportedParameterError: It asks for retrieval, and there is no retriever.
    """

    def __init__(self, service: Service, request: QueryRequest) -> None:
        if request.model is not None and request.model != service.model_name:
            raise ModelNotFoundError(
                f"the model {request.model!r} is not served here; this is {service.model_name!r}",
                param="model",
            )
        if request.top_k is not None and service.retriever is None:
            raise UnsupportedParameterError(
                "this server has no retriever; name the documents in document_ids", param="top_k"
            )
        self._service = service
        self._request = request

    def answer(self, scope: WorkerScope) -> None:
        """Emits :class:`Started`, any number of :class:`TextPiece`, :class:`Completed`.

        Raises:
            ChunkCacheError: The request cannot be served, failed, or was cancelled.
        """
        try:
            self._answer(scope)
        except ChunkCacheError as error:
            _name_field(error)
            raise

    def plan(self, scope: WorkerScope) -> None:
        """Emits :class:`Completed` with what would run. Errors as in :meth:`answer`."""
        try:
            options = self._options()
            plan = self._service.cache.plan(self._request.query, self._documents(), options)
        except ChunkCacheError as error:
            _name_field(error)
            raise
        scope.emit(Completed(self._plan_body(plan, options)))

    def _answer(self, scope: WorkerScope) -> None:
        options = self._options()
        documents = self._documents()
        scope.check()
        growing = self._service.cache.stream(self._request.query, documents, options)
        scope.attach(growing)
        scope.emit(Started(growing.id))
        for piece in growing:
            scope.emit(TextPiece(piece))
        body = growing.answer().to_dict()
        scope.emit(Completed(body | {"model": self._service.model_name}))

    def _options(self) -> AskOptions:
        settings = self._service.cache.runtime.settings
        return self._request.ask_options(settings.max_answer_tokens)

    def _documents(self) -> Sequence[str | DocumentRef]:
        request, retriever = self._request, self._service.retriever
        if request.document_ids is not None:
            return request.document_ids
        assert retriever is not None
        assert request.top_k is not None
        return retriever.retrieve(request.query, request.top_k)

    def _plan_body(self, plan: FusionPlan, options: AskOptions) -> dict[str, Any]:
        runtime = self._service.cache.runtime
        documents: dict[str, dict[str, Any]] = {}
        for segment, identity in zip(plan.layout.chunks, plan.identities, strict=True):
            assert segment.chunk is not None
            name = segment.chunk.document_id
            entry = documents.setdefault(
                name, {"id": name, "tokens": 0, "chunks": 0, "cached_chunks": 0}
            )
            entry["tokens"] += len(segment.token_ids)
            entry["chunks"] += 1
            entry["cached_chunks"] += runtime.stack.contains(identity.key())
        room = runtime.engine.check_fits(plan.layout.num_tokens)
        return {
            "object": "chunkcache.plan",
            "model": self._service.model_name,
            "prompt_tokens": plan.layout.num_tokens,
            "context_tokens": plan.layout.num_context_tokens,
            "max_tokens": min(options.max_tokens, room),
            "policy": str(plan.policy),
            "requested_policy": str(plan.requested_policy),
            "preparation": plan.preparation,
            "documents": list(documents.values()),
            "warnings": [asdict(w) for w in plan.warnings],
        }


def _name_field(error: ChunkCacheError) -> None:
    """The library names its own arguments; some of them are one level down in a request."""
    if error.param in ReuseOptions.model_fields:
        error.param = f"chunkcache.{error.param}"
