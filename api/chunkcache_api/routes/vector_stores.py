"""``/v1/vector_stores``: named sets of documents, under the names that OpenAI's clients know.

A document is embedded and prefilled once, whichever sets it is in.
"""

from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from chunkcache.chunk_cache import ChunkCache
from chunkcache.collection_values import Collection, CollectionSize
from chunkcache.document_collections import DocumentCollections
from chunkcache_api.file_views import vector_store_body
from chunkcache_api.json_body import body_schema, json_response, read_body
from chunkcache_api.paging import Page, page_body
from chunkcache_api.routes.current import CurrentService
from chunkcache_api.routes.threads import on_thread
from chunkcache_api.schemas.vector_stores import (
    STORE_NEUTRAL,
    CreateVectorStoreRequest,
    ListParams,
    UpdateVectorStoreRequest,
)

router = APIRouter(prefix="/v1/vector_stores", tags=["vector stores"])

MAX_BODY_BYTES: Final = 2 << 20


@router.post("", openapi_extra=body_schema(CreateVectorStoreRequest))
async def create_vector_store(request: Request, service: CurrentService) -> Response:
    """Make a set of documents."""
    body = await read_body(request, CreateVectorStoreRequest, STORE_NEUTRAL)
    return await on_thread(service.quick_threads, partial(_create, service.cache, body))


@router.get("")
async def list_vector_stores(
    params: Annotated[ListParams, Query()], service: CurrentService
) -> Response:
    """A page of sets, the newest first."""
    return await on_thread(service.quick_threads, partial(_list, service.cache, params))


@router.get("/{vector_store_id}")
async def get_vector_store(vector_store_id: str, service: CurrentService) -> Response:
    """A set, and how much is in it."""
    return await on_thread(service.quick_threads, partial(_get, service.cache, vector_store_id))


@router.post("/{vector_store_id}", openapi_extra=body_schema(UpdateVectorStoreRequest))
async def update_vector_store(
    vector_store_id: str, request: Request, service: CurrentService
) -> Response:
    """Say other things of a set."""
    body = await read_body(request, UpdateVectorStoreRequest, STORE_NEUTRAL)
    work = partial(_update, service.cache, vector_store_id, body)
    return await on_thread(service.quick_threads, work)


@router.delete("/{vector_store_id}")
async def delete_vector_store(vector_store_id: str, service: CurrentService) -> Response:
    """Remove a set; its documents stay."""
    return await on_thread(service.quick_threads, partial(_delete, service.cache, vector_store_id))


def _create(cache: ChunkCache, body: CreateVectorStoreRequest) -> Response:
    collections = cache.catalog.collections
    collection = collections.create(
        body.name or "",
        description=body.description or "",
        metadata=body.metadata,
        document_ids=body.file_ids or (),
    )
    return _response(collections, collection)


def _list(cache: ChunkCache, params: ListParams) -> Response:
    collections = cache.catalog.collections
    sizes = collections.sizes()

    def body(collection: Collection) -> dict[str, Any]:
        return vector_store_body(collection, sizes.get(collection.collection_id, CollectionSize()))

    page = Page(params.limit, params.order, params.after, params.before)
    found = collections.list()
    return json_response(page_body(found, page, lambda c: (c.created_at, c.collection_id), body))


def _get(cache: ChunkCache, name: str) -> Response:
    collections = cache.catalog.collections
    return _response(collections, collections.get(name))


def _update(cache: ChunkCache, name: str, body: UpdateVectorStoreRequest) -> Response:
    collections = cache.catalog.collections
    return _response(collections, collections.update(name, name=body.name, metadata=body.metadata))


def _delete(cache: ChunkCache, name: str) -> Response:
    cache.catalog.collections.delete(name)
    return json_response({"id": name, "object": "vector_store.deleted", "deleted": True})


def _response(collections: DocumentCollections, collection: Collection) -> Response:
    size = collections.sizes().get(collection.collection_id, CollectionSize())
    return json_response(vector_store_body(collection, size))
