"""``POST /v1/query``: ask a question over documents."""

from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from chunkcache_api.answering import Completed, QueryWork
from chunkcache_api.disconnect import cancelled_on_disconnect
from chunkcache_api.json_body import body_schema, json_response, read_body
from chunkcache_api.routes.current import CurrentService
from chunkcache_api.schemas.query import QueryRequest
from chunkcache_api.sse import QueryStreamResponse
from chunkcache_api.workers import Produce, WorkerPool

PATH: Final = "/v1/query"
MAX_BODY_BYTES: Final = 2 << 20
"""A query holds no documents; parsing more than this would hold up every other request."""

router = APIRouter(tags=["query"])


@router.post(PATH, openapi_extra=body_schema(QueryRequest))
async def query(request: Request, service: CurrentService) -> Response:
    """Answer a question from documents, at once or as server-sent events."""
    body = await read_body(request, QueryRequest)
    work = QueryWork(service, body)
    if body.stream:
        return QueryStreamResponse(service.workers, work, service.model_name)
    produce = work.plan if body.chunkcache.dry_run else work.answer
    return json_response(await _completed(service.workers, produce, request))


async def _completed(pool: WorkerPool, produce: Produce, request: Request) -> dict[str, Any]:
    """Wait for a query's end; the client's leaving ends it."""
    with pool.start(produce) as worker, cancelled_on_disconnect(worker, request.receive):
        async for event in worker:
            if isinstance(event, Completed):
                return event.body
    raise AssertionError("a query ended without its answer")
