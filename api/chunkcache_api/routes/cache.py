"""``/v1/cache``: what is cached, and making room. For operators."""

from dataclasses import asdict
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from chunkcache.cache_clearing import clear_entries
from chunkcache.chunk_cache import ChunkCache
from chunkcache.upkeep.collect import collect
from chunkcache_api.cache_stats import cache_stats_body
from chunkcache_api.json_body import body_schema, json_response, read_body
from chunkcache_api.routes.current import CurrentService
from chunkcache_api.routes.threads import on_thread
from chunkcache_api.schemas.cache import ClearRequest, CollectRequest
from chunkcache_api.service import Service

router = APIRouter(prefix="/v1/cache", tags=["cache"])


@router.get("/stats")
async def cache_stats(service: CurrentService) -> Response:
    """Hits and misses, bytes by tier, prompt tokens that were not run, and how close answers are.

    Counts are of all tenants, since the start. ``/metrics`` has the same for Prometheus. Documents
    and quota are the key's own tenant's.
    """
    return await on_thread(service.quick_threads, partial(_stats, service))


@router.post("/clear", openapi_extra=body_schema(ClearRequest))
async def clear_cache(request: Request, service: CurrentService) -> Response:
    """Drop what is cached of the documents of the key's tenant; the documents stay.

    What is asked for again is read from disk, or computed again.
    """
    body = await read_body(request, ClearRequest)
    return await on_thread(service.quick_threads, partial(_clear, service.cache, body))


@router.post("/gc", openapi_extra=body_schema(CollectRequest))
async def collect_garbage(request: Request, service: CurrentService) -> Response:
    """Remove from the store what nothing needs: expired documents first, of all tenants."""
    body = await read_body(request, CollectRequest)
    return await on_thread(service.quick_threads, partial(_collect, service.cache, body))


def _stats(service: Service) -> Response:
    return json_response(cache_stats_body(service))


def _clear(cache: ChunkCache, body: ClearRequest) -> Response:
    cleared = clear_entries(cache.runtime, cache.catalog, set(body.tiers))
    return json_response(
        {
            "object": "chunkcache.cache_clear",
            "tiers": sorted({"host", *body.tiers}),
            "dropped_entries": cleared.num_entries,
            "dropped_prompt_tokens": cleared.num_prompt_tokens,
        }
    )


def _collect(cache: ChunkCache, body: CollectRequest) -> Response:
    runtime = cache.runtime
    report = collect(runtime.env, drop_models=body.drop_models, dry_run=body.dry_run)
    if not body.dry_run:
        runtime.follow_removals()
    fields = asdict(report)
    del fields["entry_keys"]
    return json_response({"object": "chunkcache.cache_gc"} | fields)
