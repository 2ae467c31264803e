"""A service that takes and gives JSON over HTTP: embeddings, rerankings. Knows neither."""

import os
from collections.abc import Mapping
from typing import Any

import httpx

from chunkcache.errors import RemoteServerError, ServerUnreachableError

_MAX_SHOWN_CHARS = 200
_CONNECT_RETRIES = 2


class JsonService:
    """Posts to one service. Safe to use from several threads.

    Args:
        base_url: What its paths stand behind, for example ``http://localhost:8080/v1``.
        key_variable: Environment variable of its API key; no key where that is not set.
        timeout_seconds: Of each wait.
        transport: HTTP transport, for tests.
    """

    def __init__(
        self,
        base_url: str,
        key_variable: str,
        *,
        timeout_seconds: float = 60.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        key = os.environ.get(key_variable)
        self._http = httpx.Client(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=timeout_seconds,
            transport=transport or httpx.HTTPTransport(retries=_CONNECT_RETRIES),
        )

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The service's answer, decoded.

        Raises:
            ServerUnreachableError: It cannot be reached.
            RemoteServerError: It answered with an error, or with what is not JSON.
        """
        url = self.base_url + path
        try:
            response = self._http.post(url, json=body)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ServerUnreachableError(
                f"{url} cannot be reached: {type(error).__name__}: {error}"
            ) from error
        if response.is_error:
            shown = response.text[:_MAX_SHOWN_CHARS]
            raise RemoteServerError(f"{url} answered {response.status_code}: {shown}")
        try:
            return response.json()
        except ValueError as error:
            raise RemoteServerError(f"{url} answered what is not JSON") from error
