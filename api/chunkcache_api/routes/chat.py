"""``POST /v1/chat/completions``: OpenAI's chat form over documents."""

from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from chunkcache_api.answer_response import answer_response
from chunkcache_api.chat_stream import ChatEvents
from chunkcache_api.chat_work import ChatWork
from chunkcache_api.json_body import body_schema, read_body
from chunkcache_api.routes.current import CurrentService
from chunkcache_api.schemas.chat import NEUTRAL_VALUES, ChatRequest

PATH: Final = "/v1/chat/completions"
MAX_BODY_BYTES: Final = 4 << 20
"""Messages may hold documents' texts, up to what a model can read."""

router = APIRouter(tags=["chat"])


@router.post(PATH, openapi_extra=body_schema(ChatRequest))
async def chat_completions(request: Request, service: CurrentService) -> Response:
    """Go on with a conversation, at once or as server-sent events."""
    body = await read_body(request, ChatRequest, NEUTRAL_VALUES)
    work = ChatWork(service, body)
    return await answer_response(
        request,
        service,
        work,
        encoder=ChatEvents(work, body) if body.stream else None,
        is_dry_run=body.chunkcache.dry_run,
    )
