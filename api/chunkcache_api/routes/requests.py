"""``GET /v1/requests/{id}``: what was planned for a request, and what came of it."""

from fastapi import APIRouter
from starlette.responses import Response

from chunkcache_api.json_body import json_response
from chunkcache_api.routes.current import CurrentService

router = APIRouter(tags=["requests"])


@router.get("/v1/requests/{id}")
async def get_request(id: str, service: CurrentService) -> Response:
    """The account of one of the latest requests: plan, sources, timings; never any text.

    Its id is the answer's. The setting ``request_log_size`` says how many are kept.
    """
    return json_response(service.requests.get(id))
