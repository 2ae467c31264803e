"""``GET /v1/cache/stats``: what the cache holds, and what it has spared."""

from functools import partial

from fastapi import APIRouter
from starlette.responses import Response

from chunkcache_api.cache_stats import cache_stats_body
from chunkcache_api.json_body import json_response
from chunkcache_api.routes.current import CurrentService
from chunkcache_api.routes.threads import on_thread
from chunkcache_api.service import Service

router = APIRouter(prefix="/v1/cache", tags=["cache"])


@router.get("/stats")
async def cache_stats(service: CurrentService) -> Response:
    """Hits and misses, bytes by tier, prompt tokens that were not run, and how close answers are.

    Counts are of all tenants, since the start. ``/metrics`` has the same for Prometheus.
    """
    return await on_thread(service.quick_threads, partial(_stats, service))


def _stats(service: Service) -> Response:
    return json_response(cache_stats_body(service))
