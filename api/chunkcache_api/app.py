"""``create_app``: the REST API over a runtime, assembled in one place."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, Final

from anyio import to_thread
from fastapi import Depends, FastAPI
from opentelemetry.trace import NoOpTracerProvider, TracerProvider

from chunkcache.runtime import Runtime
from chunkcache_api.auth.access import Gatekeeper, check_access
from chunkcache_api.auth.key_ring import KeyRing
from chunkcache_api.body_limit import BodyLimit
from chunkcache_api.error_responses import UnexpectedErrors, add_error_handlers
from chunkcache_api.jobs import NeighboursFactory
from chunkcache_api.metrics import metrics_registry
from chunkcache_api.request_id import RequestId
from chunkcache_api.retrieval import RetrieverFactory
from chunkcache_api.routes import (
    bulk,
    cache,
    chat,
    documents,
    files,
    health,
    jobs,
    metrics,
    models,
    page,
    pins,
    query,
    requests,
    responses,
    search,
    vector_store_files,
    vector_stores,
)
from chunkcache_api.schemas.errors import ErrorBody
from chunkcache_api.service import RuntimeFactory, ServiceState

DEFAULT_MAX_BODY_BYTES: Final = 16 << 20
ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"model": ErrorBody, "description": "Refused; `code` says why."},
    503: {"model": ErrorBody, "description": "Not ready, stopping, or the store is unusable."},
    507: {"model": ErrorBody, "description": "No room: of the store, a quota, or pins."},
}
"""What any route may answer beside what it is for."""


def create_app(
    runtime: Runtime | RuntimeFactory,
    *,
    retriever_factory: RetrieverFactory | None = None,
    neighbours_factory: NeighboursFactory | None = None,
    keys: KeyRing | None = None,
    metrics_are_open: bool = False,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    on_load_failure: Callable[[BaseException], None] = lambda error: None,
    tracer_provider: TracerProvider | None = None,
) -> FastAPI:
    """Build the application.

    Args:
        runtime: An open runtime, which the caller closes afterwards; or what opens one. That is
            called on a thread when the application starts: until it has returned, ``/readyz`` and
            every route that needs the model answer 503 ``model_loading``. What it opened is
            closed when the application stops.
        retriever_factory: Builds what finds documents for ``top_k`` and ``/v1/search``; called
            once for each tenant, behind ``runtime``. None refuses both.
        neighbours_factory: Makes what finds neighbours for jobs, where the preparation has some; called
            for each job. None has such jobs fail.
        keys: The API keys in force; None lets everybody in, as the default tenant.
        metrics_are_open: Whether ``/metrics`` needs no key.
        max_body_bytes: Largest request body; for queries 2 MiB and for conversations 4 MiB, where
            that is less.
        on_load_failure: Told why loading failed; the application goes on answering 503.
        tracer_provider: Takes spans of the requests and their stages; None makes none.
    """
    spans = tracer_provider or NoOpTracerProvider()
    tracer = spans.get_tracer("chunkcache", version("chunkcache"))
    state = ServiceState(
        runtime, retriever_factory, on_load_failure, tracer, neighbours_factory=neighbours_factory
    )
    gatekeeper = Gatekeeper(keys or KeyRing(None), metrics_are_open=metrics_are_open)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if isinstance(runtime, Runtime):
            await to_thread.run_sync(state.open)
        else:
            state.start()
        try:
            yield
        finally:
            await to_thread.run_sync(state.close)

    app = FastAPI(
        title="chunkcache",
        version=version("chunkcache"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(check_access)],
        responses=ERRORS,
        # The framework's records of failures would hold what exceptions say, and so maybe text.
        telemetry={
            "tracing": True,
            "tracer_provider": spans,
            "operation_spans": False,
            "metrics": False,
            "logs": False,
        },
    )
    app.state.gatekeeper = gatekeeper
    app.state.service = state
    app.state.metrics = metrics_registry(state, gatekeeper.keys)
    add_error_handlers(app)
    app.add_middleware(UnexpectedErrors)
    app.add_middleware(
        BodyLimit,
        max_body_bytes=max_body_bytes,
        lower_limits={
            query.PATH: query.MAX_BODY_BYTES,
            search.PATH: query.MAX_BODY_BYTES,
            bulk.LOOKUP_PATH: bulk.MAX_LOOKUP_BYTES,
            chat.PATH: chat.MAX_BODY_BYTES,
            responses.PATH: chat.MAX_BODY_BYTES,
        },
    )
    app.add_middleware(RequestId)
    for routes in (
        query,
        chat,
        responses,
        search,
        bulk,
        documents,
        files,
        vector_store_files,
        vector_stores,
        jobs,
        cache,
        pins,
        models,
        requests,
        health,
        metrics,
        page,
    ):
        app.include_router(routes.router)
    return app
