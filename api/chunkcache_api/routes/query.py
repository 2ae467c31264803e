"""``POST /v1/query``: ask a question over documents."""

from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from chunkcache_api.answer_response import answer_response
from chunkcache_api.json_body import body_schema, read_body
from chunkcache_api.query_work import QueryWork
from chunkcache_api.routes.current import CurrentService
from chunkcache_api.schemas.query import QueryRequest
from chunkcache_api.sse import QueryEvents

PATH: Final = "/v1/query"
MAX_BODY_BYTES: Final = 2 << 20
"""A query holds no documents; parsing more than this would hold up every other request."""

router = APIRouter(tags=["query"])


@router.post(PATH, openapi_extra=body_schema(QueryRequest))
async def query(request: Request, service: CurrentService) -> Response:
    """Answer a question from documents, at once or as server-sent events."""
    body = await read_body(request, QueryRequest)
    return await answer_response(
        request,
        service,
        QueryWork(service, body),
        encoder=QueryEvents(service.model_name) if body.stream else None,
        is_dry_run=body.chunkcache.dry_run,
    )
