"""The files of a vector store, and searches in it."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from chunkcache.chunk_cache import ChunkCache
from chunkcache.collection_values import Member
from chunkcache.errors import UnsupportedParameterError
from chunkcache.identity import ChunkId
from chunkcache_api.file_views import file_of, member_body, searched_metadata
from chunkcache_api.json_body import body_schema, json_response, read_body
from chunkcache_api.paging import Page, page_body
from chunkcache_api.retrieval import Retriever
from chunkcache_api.routes.current import CurrentService
from chunkcache_api.routes.opaque_id import decoded_id, raw_path
from chunkcache_api.routes.threads import on_thread
from chunkcache_api.schemas.vector_stores import (
    FILE_NEUTRAL,
    SEARCH_NEUTRAL,
    AttachFileRequest,
    ListFilesParams,
    SearchVectorStoreRequest,
    UpdateFileRequest,
)
from chunkcache_retriever.metadata_filter import parse_filter
from chunkcache_retriever.retriever import ChunkHit

_FILES: Final = b"/files/"
_CONTENT: Final = b"/content"

FileId = Annotated[str, Path(description="A document's id: any text, percent-encoded.")]

router = APIRouter(prefix="/v1/vector_stores/{vector_store_id}", tags=["vector stores"])


@router.post("/search", openapi_extra=body_schema(SearchVectorStoreRequest))
async def search_vector_store(
    vector_store_id: str, request: Request, service: CurrentService
) -> Response:
    """Passages of a set's documents by meaning and by words, the best first."""
    body = await read_body(request, SearchVectorStoreRequest, SEARCH_NEUTRAL)
    if service.retriever is None:
        raise UnsupportedParameterError("this server has no retriever")
    work = partial(_search, service.cache, service.retriever, vector_store_id, body)
    return await on_thread(service.search_threads, work)


@router.post("/files", openapi_extra=body_schema(AttachFileRequest))
async def attach_file(vector_store_id: str, request: Request, service: CurrentService) -> Response:
    """Put a document into a set; it is ready when this answers."""
    body = await read_body(request, AttachFileRequest, FILE_NEUTRAL)
    work = partial(_attach, service.cache, vector_store_id, body.file_id, body.attributes)
    return await on_thread(service.quick_threads, work)


@router.get("/files")
async def list_vector_store_files(
    vector_store_id: str, params: Annotated[ListFilesParams, Query()], service: CurrentService
) -> Response:
    """A page of a set's documents, those that joined last first."""
    work = partial(_list, service.cache, vector_store_id, params)
    return await on_thread(service.quick_threads, work)


@router.get("/files/{id:opaque}/content")
async def vector_store_file_content(
    vector_store_id: str, id: FileId, request: Request, service: CurrentService
) -> Response:
    """The chunks that a document was cut into."""
    encoded = _encoded(request)
    if not encoded.endswith(_CONTENT):  # the slash is part of the id
        return await get_vector_store_file(vector_store_id, id, request, service)
    name = decoded_id(encoded.removesuffix(_CONTENT))
    work = partial(_content, service.cache, vector_store_id, name)
    return await on_thread(service.quick_threads, work)


@router.get("/files/{id:opaque}")
async def get_vector_store_file(
    vector_store_id: str, id: FileId, request: Request, service: CurrentService
) -> Response:
    """A document of a set."""
    work = partial(_get, service.cache, vector_store_id, decoded_id(_encoded(request)))
    return await on_thread(service.quick_threads, work)


@router.post("/files/{id:opaque}", openapi_extra=body_schema(UpdateFileRequest))
async def update_vector_store_file(
    vector_store_id: str, id: FileId, request: Request, service: CurrentService
) -> Response:
    """Say something else of a document of a set."""
    name = decoded_id(_encoded(request))
    body = await read_body(request, UpdateFileRequest)
    work = partial(_update, service.cache, vector_store_id, name, body)
    return await on_thread(service.quick_threads, work)


@router.delete("/files/{id:opaque}")
async def detach_file(
    vector_store_id: str, id: FileId, request: Request, service: CurrentService
) -> Response:
    """Take a document out of a set; the document stays."""
    work = partial(_detach, service.cache, vector_store_id, decoded_id(_encoded(request)))
    return await on_thread(service.quick_threads, work)


def _encoded(request: Request) -> bytes:
    """The document's id in the path, still encoded."""
    return raw_path(request).partition(b"/v1/vector_stores/")[2].partition(_FILES)[2]


def _attach(
    cache: ChunkCache, store: str, document_id: str, attributes: dict[str, Any] | None
) -> Response:
    member = cache.catalog.collections.add(store, document_id, attributes)
    return _response(cache, store, member)


def _update(cache: ChunkCache, store: str, document_id: str, body: UpdateFileRequest) -> Response:
    cache.catalog.collections.member(store, document_id)
    return _attach(cache, store, document_id, body.attributes)


def _list(cache: ChunkCache, store: str, params: ListFilesParams) -> Response:
    is_any_wanted = params.filter in (None, "completed")
    members = cache.catalog.collections.members(store) if is_any_wanted else ()
    chunk_tokens = cache.runtime.settings.chunk_tokens
    page = Page(params.limit, params.order, params.after, params.before)
    return json_response(
        page_body(
            members,
            page,
            lambda m: (m.added_at, m.document.document_id),
            lambda m: member_body(store, m, chunk_tokens),
        )
    )


def _get(cache: ChunkCache, store: str, document_id: str) -> Response:
    return _response(cache, store, cache.catalog.collections.member(store, document_id))


def _content(cache: ChunkCache, store: str, document_id: str) -> Response:
    cache.catalog.collections.member(store, document_id)
    document = cache.get(document_id)
    return json_response(
        {
            "object": "vector_store.file_content.page",
            "data": [{"type": "text", "text": document.chunk_text(c)} for c in document.chunks],
            "has_more": False,
            "next_page": None,
        }
    )


def _detach(cache: ChunkCache, store: str, document_id: str) -> Response:
    cache.catalog.collections.remove(store, document_id)
    return json_response(
        {"id": document_id, "object": "vector_store.file.deleted", "deleted": True}
    )


def _search(
    cache: ChunkCache, retriever: Retriever, store: str, body: SearchVectorStoreRequest
) -> Response:
    filters = None if body.filters is None else parse_filter(body.filters)
    members = {
        m.document.document_id: m
        for m in cache.catalog.collections.members(store)
        if filters is None or filters.matches(searched_metadata(m))
    }
    best: dict[ChunkId, ChunkHit] = {}
    for query in body.query:
        for hit in retriever.search(query, body.max_num_results, None, members.keys()):
            known = best.get(hit.chunk_id)
            if known is None or known.score < hit.score:
                best[hit.chunk_id] = hit
    hits = sorted(best.values(), key=lambda hit: -hit.score)[: body.max_num_results]
    threshold = body.ranking_options.score_threshold
    return json_response(
        {
            "object": "vector_store.search_results.page",
            "search_query": body.query,
            "data": _results([h for h in hits if h.score >= threshold], members),
            "has_more": False,
            "next_page": None,
        }
    )


def _results(hits: Sequence[ChunkHit], members: dict[str, Member]) -> list[dict[str, Any]]:
    return [
        {
            "file_id": hit.document_id,
            "filename": file_of(members[hit.document_id].document).filename,
            "score": hit.score,
            "attributes": dict(members[hit.document_id].attributes),
            "content": [{"type": "text", "text": hit.text}],
        }
        for hit in hits
    ]


def _response(cache: ChunkCache, store: str, member: Member) -> Response:
    return json_response(member_body(store, member, cache.runtime.settings.chunk_tokens))
