"""``POST /v1/search``: the passages that bear on a question, without an answer."""

from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from chunkcache.errors import UnsupportedParameterError
from chunkcache_api.json_body import body_schema, json_response, read_body
from chunkcache_api.retrieval import Retriever
from chunkcache_api.routes.current import CurrentService
from chunkcache_api.routes.threads import on_thread
from chunkcache_api.schemas.search import SearchRequest
from chunkcache_retriever.metadata_filter import parse_filter
from chunkcache_retriever.retriever import ChunkHit

PATH: Final = "/v1/search"

router = APIRouter(tags=["search"])


@router.post(PATH, openapi_extra=body_schema(SearchRequest))
async def search(request: Request, service: CurrentService) -> Response:
    """Passages by meaning and by words, the best first."""
    body = await read_body(request, SearchRequest)
    if service.retriever is None:
        raise UnsupportedParameterError("this server has no retriever")
    return await on_thread(service.search_threads, partial(_search, service.retriever, body))


def _search(retriever: Retriever, body: SearchRequest) -> Response:
    filters = None if body.filters is None else parse_filter(body.filters)
    hits = retriever.search(body.query, body.top_k, filters)
    return json_response({"object": "list", "data": [_hit_body(hit) for hit in hits]})


def _hit_body(hit: ChunkHit) -> dict[str, Any]:
    return {
        "object": "chunkcache.search_result",
        "document_id": hit.document_id,
        "chunk_index": hit.chunk_index,
        "score": hit.score,
        "text": hit.text,
        "start": hit.start,
        "end": hit.end,
        "metadata": hit.metadata,
        "also_in": [{"document_id": name, "chunk_index": index} for name, index in hit.also_in],
    }
