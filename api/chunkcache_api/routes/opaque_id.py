"""Ids in paths: any text, slashes included, percent-encoded, decoded once and strictly."""

from urllib.parse import unquote_to_bytes

from fastapi import Request
from starlette.convertors import Convertor, register_url_convertor

from chunkcache.documents import check_document_id
from chunkcache.errors import InvalidValueError


class _OpaqueConvertor(Convertor[str]):
    """The rest of a path, line ends included (the framework's own ``path`` stops at them)."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("opaque", _OpaqueConvertor())


def raw_path(request: Request) -> bytes:
    """The path as it was sent, without its query."""
    return request.scope.get("raw_path") or request.scope["path"].encode()


def decoded_id(encoded: bytes) -> str:
    """A document's id from its part of a raw path.

    Raises:
        InvalidValueError: It is not acceptable as an id.
    """
    try:
        identifier = unquote_to_bytes(encoded).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidValueError("a document id is UTF-8", param="document_id") from error
    check_document_id(identifier)
    return identifier
