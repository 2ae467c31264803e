"""``POST /v1/documents``: many documents at once; and what of documents and texts is cached."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final

from anyio import to_thread
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from chunkcache.chunk_cache import ChunkCache
from chunkcache.lookup import CacheState, look_up_documents, look_up_text
from chunkcache.loose_text import TextRef
from chunkcache_api.bulk import BulkRun
from chunkcache_api.errors import UnsupportedMediaTypeError
from chunkcache_api.json_body import body_schema, json_response, read_body
from chunkcache_api.routes.current import CurrentService
from chunkcache_api.routes.threads import on_thread
from chunkcache_api.schemas.bulk import BULK_SCHEMA, NDJSON_TYPES, LookupRequest
from chunkcache_api.service import Service

LOOKUP_PATH: Final = "/v1/documents/lookup"
MAX_LOOKUP_BYTES: Final = 4 << 20

router = APIRouter(tags=["documents"])


@router.post("/v1/documents", openapi_extra=BULK_SCHEMA)
async def put_documents(request: Request, service: CurrentService) -> Response:
    """Store documents, one a line, and prefill them; the response has a line for each, as it is done.

    Each line says how far the body is read (``progress``); the last one sums up. A line that
    cannot be taken says why, and the others go on.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in NDJSON_TYPES:
        raise UnsupportedMediaTypeError(
            f"the body must be sent as content-type: {NDJSON_TYPES[0]}, one document a line"
        )
    run = BulkRun(service.cache, await request.body())
    first = await on_thread(service.prefill_threads, run.step)
    return StreamingResponse(
        _results(service, run, first),
        media_type=NDJSON_TYPES[0],
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


@router.post(LOOKUP_PATH, openapi_extra=body_schema(LookupRequest))
async def look_up(request: Request, service: CurrentService) -> Response:
    """What of documents and texts is cached, in which tier; nothing is loaded or computed."""
    body = await read_body(request, LookupRequest)
    return await on_thread(service.quick_threads, partial(_look_up, service.cache, body))


async def _results(service: Service, run: BulkRun, first: bytes | None) -> AsyncIterator[bytes]:
    """Every result, each as soon as it is there; a client that leaves ends the run behind one."""
    result = first
    while result is not None:
        yield result
        result = await to_thread.run_sync(run.step, limiter=service.prefill_threads)


def _look_up(cache: ChunkCache, body: LookupRequest) -> Response:
    found = cache.on_current(lambda model: look_up_documents(model, body.document_ids))
    refs = [TextRef(f"texts[{i}]", t, f"texts[{i}]") for i, t in enumerate(body.texts)]
    texts = [cache.on_current(lambda model, r=ref: look_up_text(model, r)) for ref in refs]
    return json_response(
        {
            "object": "list",
            "data": [
                {"id": name, "object": "chunkcache.lookup"} | _state_body(found.get(name))
                for name in body.document_ids
            ],
            "texts": [
                {"index": index, "object": "chunkcache.lookup"} | _state_body(state)
                for index, state in enumerate(texts)
            ],
        }
    )


def _state_body(state: CacheState | None) -> dict[str, Any]:
    if state is None:
        return {"found": False}
    return {
        "found": True,
        "cached": state.is_cached,
        "chunks": state.num_chunks,
        "tokens": state.num_tokens,
        "cached_chunks": state.chunks_by_tier.total(),
        "cached_tokens": state.tokens_by_tier.total(),
        "tiers": {
            tier: {"chunks": state.chunks_by_tier[tier], "tokens": state.tokens_by_tier[tier]}
            for tier in ("host", "disk")
        },
    }
