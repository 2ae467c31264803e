"""``POST /v1/responses``: OpenAI's newer form, which Open Responses describes, over documents."""

from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from chunkcache_api.answer_response import answer_response
from chunkcache_api.json_body import body_schema, read_body
from chunkcache_api.responses_stream import ResponsesEvents
from chunkcache_api.responses_work import ResponsesWork
from chunkcache_api.routes.current import CurrentService
from chunkcache_api.schemas.responses import NEUTRAL_VALUES, ResponsesRequest

PATH: Final = "/v1/responses"

router = APIRouter(tags=["chat"])


@router.post(PATH, openapi_extra=body_schema(ResponsesRequest))
async def responses(request: Request, service: CurrentService) -> Response:
    """Answer a message or go on with a conversation, at once or as server-sent events.

    Nothing of it is kept: there is no ``previous_response_id``.
    """
    body = await read_body(request, ResponsesRequest, NEUTRAL_VALUES)
    work = ResponsesWork(service, body)
    return await answer_response(
        request,
        service,
        work,
        encoder=ResponsesEvents(work) if body.stream else None,
        is_dry_run=body.chunkcache.dry_run,
    )
