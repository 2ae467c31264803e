"""A limit on the size of request bodies, with or without a declared length.

FastAPI's own limit answers in plain text where a handler does not read the body; this one gives
the API's error form on every path.
"""

from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chunkcache_api.error_responses import error_response
from chunkcache_api.errors import BodyTooLargeError


class BodyLimit:
    """ASGI middleware: refuses a body over the limit before it is in memory.

    Args:
        app: The application.
        max_body_bytes: The limit.
        lower_limits: Lower limits of some paths.
    """

    def __init__(
        self, app: ASGIApp, max_body_bytes: int, lower_limits: Mapping[str, int] | None = None
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._lower_limits = lower_limits or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request.

        Raises:
            BodyTooLargeError: From ``receive``, inside the application, once a body without a
                declared length turns out to be too large.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        lower = self._lower_limits.get(scope["path"], self._max_body_bytes)
        limit = min(lower, self._max_body_bytes)
        if _declared_bytes(scope) > limit:
            await error_response(_too_large(limit))(scope, receive, send)
            return
        num_bytes = 0

        async def counted_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > limit:
                    raise _too_large(limit)
            return message

        await self._app(scope, counted_receive, send)


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is over {limit} bytes")


def _declared_bytes(scope: Scope) -> int:
    """Servers check that the header is one number; what is not is counted on arrival."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and len(value) < 20:
            return int(value)
    return 0
