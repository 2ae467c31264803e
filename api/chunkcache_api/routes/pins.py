"""``/v1/cache/pins``: hints on what to keep in RAM."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from chunkcache.chunk_cache import ChunkCache
from chunkcache.errors import InvalidValueError
from chunkcache_api.json_body import body_schema, json_response, read_body
from chunkcache_api.routes.current import CurrentService
from chunkcache_api.routes.threads import on_thread
from chunkcache_api.schemas.pins import PinRequest, UnpinRequest

router = APIRouter(prefix="/v1/cache/pins", tags=["cache"])


@router.post("", openapi_extra=body_schema(PinRequest))
async def pin(request: Request, service: CurrentService) -> Response:
    """Keep documents in RAM for ``ttl_s`` seconds, or expect a use in ``next_use_s`` seconds.

    Missing entries are computed. Pins may hold a share of RAM; beyond it, 507 ``pin_limit`` and
    nothing is pinned that was not.
    """
    body = await read_body(request, PinRequest)
    return await on_thread(service.prefill_threads, partial(_pin, service.cache, body))


@router.delete("", openapi_extra=body_schema(UnpinRequest))
async def unpin(request: Request, service: CurrentService) -> Response:
    """End pins."""
    body = await read_body(request, UnpinRequest)
    return await on_thread(service.quick_threads, partial(_unpin, service.cache, body))


def _pin(cache: ChunkCache, body: PinRequest) -> Response:
    value: dict[str, Any] = {"object": "chunkcache.pins", "document_ids": body.document_ids}
    if (body.ttl_s is None) == (body.next_use_s is None):
        raise InvalidValueError("give one of ttl_s and next_use_s", param="ttl_s")
    if body.ttl_s is not None:
        result = cache.pin(body.document_ids, ttl_s=body.ttl_s)
        value |= {"ttl_s": body.ttl_s, "chunks": result.num_chunks, "bytes": result.num_bytes}
    elif body.next_use_s is not None:
        num_held = cache.next_use(body.document_ids, in_s=body.next_use_s)
        value |= {"next_use_s": body.next_use_s, "chunks": num_held}
    return json_response(value)


def _unpin(cache: ChunkCache, body: UnpinRequest) -> Response:
    num_chunks = cache.unpin(body.document_ids)
    return json_response({"object": "chunkcache.pins", "unpinned_chunks": num_chunks})
