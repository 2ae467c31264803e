"""``/v1/cache``: what is cached, and making room. For operators."""

from dataclasses import asdict
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from chunkcache.cache_clearing import clear_entries
from chunkcache.chunk_cache import ChunkCache
from chunkcache.upkeep.collect import collect
from chunkcache_api.json_body import body_schema, json_response, read_body
from chunkcache_api.routes.current import CurrentService
from chunkcache_api.routes.threads import on_thread
from chunkcache_api.schemas.cache import ClearRequest, CollectRequest

router = APIRouter(prefix="/v1/cache", tags=["cache"])


@router.get("/stats")
async def cache_stats(service: CurrentService) -> Response:
    """Entries and bytes by tier, of all tenants; documents and quota of the key's own."""
    return await on_thread(service.quick_threads, partial(_stats, service.cache))


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


def _stats(cache: ChunkCache) -> Response:
    runtime, catalog = cache.runtime, cache.catalog
    size, quota = catalog.size(), runtime.quota
    with runtime.env.read() as txn:
        live_bytes = txn.live_bytes()
    tenant: dict[str, Any] = {
        "documents": catalog.count(),
        "tokens": size.num_tokens,
        "record_bytes": size.record_bytes,
        "quota": None
        if quota is None
        else {"used_bytes": quota.bytes_of(size), "max_bytes": quota.max_bytes},
    }
    return json_response(
        {
            "object": "chunkcache.cache_stats",
            "tiers": asdict(runtime.stack.stats()),
            "store": {
                "file_bytes": runtime.env.file_bytes,
                "live_bytes": live_bytes,
                "max_bytes": runtime.settings.store_max_bytes,
            },
            "host_max_bytes": runtime.settings.host_tier_bytes,
            "tenant": tenant,
        }
    )


def _clear(cache: ChunkCache, body: ClearRequest) -> Response:
    num_dropped = clear_entries(cache.runtime, cache.catalog, set(body.tiers))
    return json_response(
        {
            "object": "chunkcache.cache_clear",
            "tiers": sorted({"host", *body.tiers}),
            "dropped_entries": num_dropped,
        }
    )


def _collect(cache: ChunkCache, body: CollectRequest) -> Response:
    runtime = cache.runtime
    report = collect(runtime.env, drop_models=body.drop_models, dry_run=body.dry_run)
    if not body.dry_run:
        runtime.stack.forget(report.entry_keys)
    fields = asdict(report)
    del fields["entry_keys"]
    return json_response({"object": "chunkcache.cache_gc"} | fields)
