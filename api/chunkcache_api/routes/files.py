"""``/v1/files``: documents under the names that OpenAI's clients know.

A file's id is its document's, so that what was stored by either way is found by both. Ids are
opaque, as in ``/v1/documents``.
"""

from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from chunkcache.chunk_cache import ChunkCache
from chunkcache_api.file_views import all_documents, file_body
from chunkcache_api.json_body import json_response
from chunkcache_api.paging import Page, page_body
from chunkcache_api.routes.current import CurrentService
from chunkcache_api.routes.opaque_id import decoded_id, raw_path
from chunkcache_api.routes.threads import on_thread
from chunkcache_api.schemas.files import UPLOAD_SCHEMA, ListFilesParams
from chunkcache_api.upload import Upload, read_upload

_FILES: Final = b"/v1/files/"
_CONTENT: Final = b"/content"

FileId = Annotated[str, Path(description="A document's id: any text, percent-encoded.")]

router = APIRouter(prefix="/v1/files", tags=["files"])


@router.post("", openapi_extra=UPLOAD_SCHEMA)
async def upload_file(request: Request, service: CurrentService) -> Response:
    """Store a file's text as a document and prefill it; once this answers, questions hit.

    The name's suffix tells how to read it: text, Markdown, HTML, PDF, Word; others are read as text.
    """
    upload = await read_upload(request)
    return await on_thread(service.prefill_threads, partial(_upload, service.cache, upload))


@router.get("")
async def list_files(
    params: Annotated[ListFilesParams, Query()], service: CurrentService
) -> Response:
    """A page of files, the newest first; every document is one."""
    return await on_thread(service.quick_threads, partial(_list, service.cache, params))


@router.get("/{id:opaque}/content")
async def file_content(id: FileId, request: Request, service: CurrentService) -> Response:
    """The text that was read from a file, in UTF-8."""
    encoded = raw_path(request).partition(_FILES)[2]
    if not encoded.endswith(_CONTENT):  # the slash is part of the id
        return await get_file(id, request, service)
    name = decoded_id(encoded.removesuffix(_CONTENT))
    return await on_thread(service.quick_threads, partial(_content, service.cache, name))


@router.get("/{id:opaque}")
async def get_file(id: FileId, request: Request, service: CurrentService) -> Response:
    """What is known of a file."""
    name = decoded_id(raw_path(request).partition(_FILES)[2])
    return await on_thread(service.quick_threads, partial(_get, service.cache, name))


@router.delete("/{id:opaque}")
async def delete_file(id: FileId, request: Request, service: CurrentService) -> Response:
    """Remove a file: its document, from every tier and every vector store."""
    name = decoded_id(raw_path(request).partition(_FILES)[2])
    return await on_thread(service.quick_threads, partial(_delete, service.cache, name))


def _upload(cache: ChunkCache, upload: Upload) -> Response:
    return json_response(file_body(upload.store(cache)))


def _list(cache: ChunkCache, params: ListFilesParams) -> Response:
    files = [file_body(document) for document in all_documents(cache.catalog)]
    wanted = [f for f in files if params.purpose in (None, f["purpose"])]
    page = Page(params.limit, params.order, params.after)
    return json_response(page_body(wanted, page, _sort_key, lambda file: file))


def _sort_key(file: dict[str, Any]) -> tuple[float, str]:
    return file["created_at"], file["id"]


def _content(cache: ChunkCache, name: str) -> Response:
    return Response(
        cache.get(name).text.encode("utf-8"),
        headers={"x-content-type-options": "nosniff"},
        media_type="text/plain; charset=utf-8",
    )


def _get(cache: ChunkCache, name: str) -> Response:
    return json_response(file_body(cache.get(name)))


def _delete(cache: ChunkCache, name: str) -> Response:
    cache.delete(name)
    return json_response({"id": name, "object": "file", "deleted": True})
