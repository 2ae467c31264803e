"""Every error as ``{"error": {"message", "type", "param", "code"}}``, on every path.

Owns the form and what may be said: no traceback, no path of this host. Knows no route.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chunkcache.errors import (
    ChunkCacheError,
    EngineFailedError,
    InvalidValueError,
    ModelError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    UnsupportedParameterError,
)
from chunkcache.failure_logs import traceback_text

RETRY_AFTER_SECONDS: Final = 1
MAX_PARAM_CHARS: Final = 200
"""The name of an unknown field is the client's own, and may be a megabyte."""

_RETRIED_CODES: Final = frozenset({"queue_full", "model_loading", "draining"})
_HTTP_CODES: Final = {404: "not_found", 405: "method_not_allowed"}

_log = structlog.get_logger("chunkcache.api")


def error_body(error: ChunkCacheError) -> dict[str, Any]:
    """The JSON form of an error, as sent to a client."""
    return {
        "error": {
            "message": _public_message(error),
            "type": _error_type(error.status),
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: ChunkCacheError) -> Response:
    """The response of an error."""
    headers: dict[str, str] = {}
    if error.code in _RETRIED_CODES:
        headers["retry-after"] = str(RETRY_AFTER_SECONDS)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return _response(error_body(error), error.status, headers)


def validation_error(errors: Sequence[Mapping[str, Any]]) -> InvalidValueError:
    """The first of pydantic's errors as ours; ``param`` is the field's path.

    Args:
        errors: As pydantic lists them. The input itself is never quoted.
    """
    first = errors[0]
    param = _field_path(first["loc"])
    if first["type"] == "extra_forbidden" and param:
        return unknown_parameter(param)
    message = str(first["msg"])
    return InvalidValueError(f"{param}: {message}" if param else message, param=param)


def unknown_parameter(name: str) -> UnsupportedParameterError:
    """A request holds a field that it does not have."""
    name = name[:MAX_PARAM_CHARS]
    return UnsupportedParameterError(f"{name} is not a parameter of this request", param=name)


def add_error_handlers(app: FastAPI) -> None:
    """Have an application answer errors in our form."""

    async def handle_ours(_: Request, error: Exception) -> Response:
        assert isinstance(error, ChunkCacheError)
        if error.status >= 500 and error.code not in _RETRIED_CODES:
            _log.warning("request_refused", code=error.code, reason=error.message)
        return error_response(error)

    async def handle_validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        located = [e | {"loc": e["loc"][1:]} for e in error.errors()]
        return error_response(validation_error(located))

    async def handle_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = _HTTP_CODES.get(error.status_code, "invalid_value")
        body = {
            "message": str(error.detail),
            "type": _error_type(error.status_code),
            "param": None,
            "code": code,
        }
        return _response({"error": body}, error.status_code, error.headers)

    app.add_exception_handler(ChunkCacheError, handle_ours)
    app.add_exception_handler(RequestValidationError, handle_validation)
    app.add_exception_handler(HTTPException, handle_http)


class UnexpectedErrors:
    """ASGI middleware: an exception that nobody foresaw is logged, and answered as a 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the response has begun: then only the connection can end."""
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = has_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            if scope["type"] != "http" or has_started:
                raise
            _log.error("request_failed", path=scope["path"], exception=traceback_text(error))
            await error_response(internal_error())(scope, receive, send)


def internal_error() -> EngineFailedError:
    """What a client is told about an unexpected exception."""
    return EngineFailedError("the server failed to handle the request; its log says why")


def _public_message(error: ChunkCacheError) -> str:
    """The library's messages name files, where a client must not learn of them."""
    if isinstance(error, StoreError) and not isinstance(error, StoreFullError | StoreReadOnlyError):
        return "the store cannot serve this request; the server's log says why"
    if isinstance(error, ModelError):
        return "the model could not be loaded; the server's log says why"
    return error.message


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def _field_path(location: Sequence[str | int]) -> str | None:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or None


def _response(
    body: Mapping[str, Any], status: int, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
