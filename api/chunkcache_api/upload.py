"""A file in a form: read within bounds, and made the text of a document."""

import secrets
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from fastapi import Request
from starlette.datastructures import UploadFile

from chunkcache.chunk_cache import ChunkCache
from chunkcache.documents import Document, UploadedFile
from chunkcache.errors import InvalidValueError
from chunkcache.file_kinds import FileKind, ReadFault
from chunkcache_api.errors import UnsupportedMediaTypeError
from chunkcache_api.schemas.files import check_fields, checked_purpose, lifetime_seconds
from chunkcache_retriever.file_readers import file_kinds

_MAX_FIELDS: Final = 8
_MAX_FIELD_BYTES: Final = 4 << 10
_KINDS: Final = file_kinds()


@dataclass(frozen=True)
class Upload:
    """A file that came in a form.

    Attributes:
        data: Its bytes.
        file: Its name and purpose.
        ttl_seconds: How long it is to be kept; None is for ever.
    """

    data: bytes
    file: UploadedFile
    ttl_seconds: int | None

    def store(self, cache: ChunkCache) -> Document:
        """Store its text as a new document, and prefill that; how to read it its name tells.

        Raises:
            InvalidValueError: No text can be read from it.
            ChunkCacheError: As in ``ChunkCache.put``.
        """
        kind = _KINDS.get(PurePosixPath(self.file.filename).suffix.lower(), _KINDS[".txt"])
        if not isinstance(kind, FileKind):
            kind = _KINDS[".txt"]  # rows of a table: one file is one document
        assert isinstance(kind, FileKind)
        found = kind.read(self.data)
        if isinstance(found, ReadFault):
            raise InvalidValueError(
                f"the file gives no text ({found.code}): {found.message}", param="file"
            )
        document_id = f"file-{secrets.token_hex(12)}"
        cache.put(
            document_id,
            found.text,
            found.metadata,
            text_format=kind.text_format,
            ttl_seconds=self.ttl_seconds,
            file=self.file,
        )
        return cache.get(document_id)


async def read_upload(request: Request) -> Upload:
    """Read a form with one file.

    Raises:
        UnsupportedMediaTypeError: The body is no form.
        InvalidValueError: A field is missing or out of range.
        UnsupportedParameterError: It has a field that an upload has not.
        HTTPException: It is not of a form's syntax, or has too many parts.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        raise UnsupportedMediaTypeError(
            "the body must be sent as content-type: multipart/form-data"
        )
    limits = {"max_files": 1, "max_fields": _MAX_FIELDS, "max_part_size": _MAX_FIELD_BYTES}
    async with request.form(**limits) as form:
        check_fields(set(form.keys()))
        if len(form.multi_items()) != len(form):
            raise InvalidValueError("the form has a field twice")
        file = form["file"]
        if not isinstance(file, UploadFile):
            raise InvalidValueError("the field file is not a file", param="file")
        texts = {k: v for k, v in form.items() if isinstance(v, str)}
        purpose = checked_purpose(texts.get("purpose", ""))
        seconds = lifetime_seconds(
            texts.get("expires_after[anchor]"), texts.get("expires_after[seconds]")
        )
        named = UploadedFile(file.filename or "upload", purpose)
        return Upload(await file.read(), named, seconds)
