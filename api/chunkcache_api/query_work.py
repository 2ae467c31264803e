"""``POST /v1/query`` as work: one question over documents, given or retrieved."""

from collections.abc import Sequence
from typing import Any

from chunkcache.errors import UnsupportedParameterError
from chunkcache.fusion.plan import FusionPlan
from chunkcache.planning import AskOptions, ContextRef
from chunkcache.results import Answer
from chunkcache.streaming import StreamingAnswer
from chunkcache_api.answering import AnswerWork
from chunkcache_api.schemas.query import QueryRequest, ReuseOptions
from chunkcache_api.service import Service
from chunkcache_api.workers import WorkerScope
from chunkcache_retriever.metadata_filter import parse_filter


class QueryWork(AnswerWork):
    """Answers one query.

    Args:
        service: Where to ask.
        request: What is asked.

    Raises:
        ModelNotFoundError: The request names another model.
        UnsupportedParameterError: It asks for retrieval, and there is no retriever.
    """

    endpoint = "/v1/query"
    id_prefix = "ans_"
    renamed_params = {name: f"chunkcache.{name}" for name in ReuseOptions.model_fields}  # noqa: RUF012

    def __init__(self, service: Service, request: QueryRequest) -> None:
        super().__init__(service, request.model, shows_prompt=request.chunkcache.show_prompt)
        if request.top_k is not None and service.retriever is None:
            raise UnsupportedParameterError(
                "this server has no retriever; name the documents in document_ids", param="top_k"
            )
        self._request = request

    def begin(self, scope: WorkerScope) -> StreamingAnswer:
        """Find the documents, and ask."""
        options = self._options()
        documents = self._documents()
        scope.check()
        return self.service.cache.stream(self._request.query, documents, options)

    def make_plan(self) -> tuple[FusionPlan, AskOptions]:
        """Find the documents, and plan."""
        options = self._options()
        return self.service.cache.plan(self._request.query, self._documents(), options), options

    def body(self, name: str, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer as the library gives it."""
        (answer,) = answers
        return answer.to_dict() | {"id": name, "model": self.service.model_name}

    def _options(self) -> AskOptions:
        settings = self.service.cache.runtime.settings
        return self._request.ask_options(settings.max_answer_tokens)

    def _documents(self) -> Sequence[ContextRef]:
        request, retriever = self._request, self.service.retriever
        if request.document_ids is not None:
            return request.document_ids
        assert retriever is not None
        assert request.top_k is not None
        filters = None if request.filters is None else parse_filter(request.filters)
        return retriever.retrieve(request.query, request.top_k, filters)
