"""``x-request-id`` in and out: for people who compare logs, never for telling requests apart."""

import re
import secrets
from typing import Final

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER: Final = b"x-request-id"

_ACCEPTABLE = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class RequestId:
    """ASGI middleware: echoes a client's id, or makes one; binds it to every line of the log.

    An id of other characters or over 128 of them, or more than one, is replaced: it would be
    written to logs and headers as it came.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (HEADER, request_id)]
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id.decode()):
            await self._app(scope, receive, send_with_id)


def _request_id(scope: Scope) -> bytes:
    given = [value for name, value in scope["headers"] if name == HEADER]
    if len(given) == 1 and _ACCEPTABLE.fullmatch(given[0]):
        return given[0]
    return f"req_{secrets.token_hex(12)}".encode()
