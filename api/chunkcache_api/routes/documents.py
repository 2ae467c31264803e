"""``/v1/documents``: store, read, list and delete documents.

Ids are opaque: any text, slashes included, percent-encoded in the path. They never name a file.
"""

from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from chunkcache.catalog_values import DocumentInfo
from chunkcache.chunk_cache import ChunkCache
from chunkcache.documents import Document
from chunkcache.errors import DocumentNotFoundError
from chunkcache.residency import document_tiers
from chunkcache_api.bulk import put_document
from chunkcache_api.json_body import body_schema, json_response, read_body
from chunkcache_api.routes.current import CurrentService
from chunkcache_api.routes.opaque_id import decoded_id, raw_path
from chunkcache_api.routes.threads import on_thread
from chunkcache_api.schemas.documents import ListDocumentsParams, PutDocumentRequest

_COLLECTION: Final = b"/v1/documents/"
_SAME_ID: Final = {"parameters": {"id": "$request.path.id"}}
_STORED: Final[dict[str, Any]] = {
    "links": {
        "get": {"operationId": "get_document"} | _SAME_ID,
        "delete": {"operationId": "delete_document"} | _SAME_ID,
    }
}
"""What may be done next with what was stored."""


router = APIRouter(prefix="/v1/documents", tags=["documents"])


async def document_id(
    request: Request, id: Annotated[str, Path(description="Any text, percent-encoded.")]
) -> str:
    """The id in the path, decoded once and strictly.

    Args:
        request: The request; its path as it was sent counts.
        id: The framework's reading, in which what is not UTF-8 has been replaced, so that
            different ids look the same.

    Raises:
        InvalidValueError: It is not acceptable as an id.
    """
    return decoded_id(raw_path(request).partition(_COLLECTION)[2])


DocumentId = Annotated[str, Depends(document_id)]


@router.put(
    "/{id:opaque}",
    openapi_extra=body_schema(PutDocumentRequest),
    responses={
        200: {"description": "It was there already, or there was another text before."} | _STORED,
        201: {"description": "It is new."} | _STORED,
    },
)
async def put_one_document(
    request: Request, identifier: DocumentId, service: CurrentService
) -> Response:
    """Store a document and prefill its chunks; once this answers, questions hit.

    201 for a new document, 200 for a new version and for one that was there already.
    """
    body = await read_body(request, PutDocumentRequest)
    return await on_thread(service.prefill_threads, partial(_put, service.cache, identifier, body))


@router.get("/{id:opaque}", operation_id="get_document")
async def get_document(identifier: DocumentId, service: CurrentService) -> Response:
    """A document with its text and where it was cut."""
    return await on_thread(service.quick_threads, partial(_get, service.cache, identifier))


@router.delete("/{id:opaque}", operation_id="delete_document")
async def delete_document(identifier: DocumentId, service: CurrentService) -> Response:
    """Remove a document from every tier, and every entry prepared behind one of its chunks."""
    return await on_thread(service.quick_threads, partial(_delete, service.cache, identifier))


@router.get("")
async def list_documents(
    params: Annotated[ListDocumentsParams, Query()], service: CurrentService
) -> Response:
    """A page of documents, in order of their ids."""
    return await on_thread(service.quick_threads, partial(_list, service.cache, params))


def _put(cache: ChunkCache, identifier: str, body: PutDocumentRequest) -> Response:
    result = put_document(cache, identifier, body)
    fields = asdict(result)
    del fields["document_id"]
    value = {"id": identifier, "object": "chunkcache.document"} | fields
    return json_response(value, 201 if result.status == "created" else 200)


def _get(cache: ChunkCache, identifier: str) -> Response:
    document = cache.catalog.get(identifier)
    if document is None:
        raise DocumentNotFoundError(f"there is no document {identifier!r}", param="document_id")
    return json_response(_document_body(document))


def _delete(cache: ChunkCache, identifier: str) -> Response:
    return json_response({"id": identifier, "deleted": True} | asdict(cache.delete(identifier)))


def _list(cache: ChunkCache, params: ListDocumentsParams) -> Response:
    found = cache.list(after=params.after, limit=params.limit + 1)
    page = found[: params.limit]
    has_more = len(found) > len(page)
    data = [_info_body(info) for info in page]
    if params.include == "tiers":
        ids = [info.document_id for info in page]
        tiers = document_tiers(cache.runtime, cache.catalog, ids)
        # One that was deleted a moment ago is nowhere.
        data = [body | {"tiers": tiers.get(body["id"], {})} for body in data]
    return json_response(
        {
            "object": "list",
            "data": data,
            "has_more": has_more,
            "next_after": page[-1].document_id if has_more else None,
        }
    )


def _info_body(info: DocumentInfo) -> dict[str, Any]:
    fields = asdict(info)
    del fields["document_id"]
    return {"id": info.document_id, "object": "chunkcache.document"} | fields


def _document_body(document: Document) -> dict[str, Any]:
    return {
        "id": document.document_id,
        "object": "chunkcache.document",
        "text": document.text,
        "metadata": document.metadata,
        "digest": document.digest.hex(),
        "version": document.version,
        "num_tokens": document.num_tokens,
        "chunks": [
            {"index": i, "start": c.start, "end": c.end, "tokens": len(c.token_ids)}
            for i, c in enumerate(document.chunks)
        ],
        "created_at": document.created_at,
        "updated_at": document.updated_at,
        "expires_at": document.expires_at,
        "file": None if document.file is None else asdict(document.file),
        "collections": document.collections,
    }
