"""An account of the latest requests: what was planned and what came of it, without any text."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from chunkcache.errors import ChunkCacheError, RequestCancelledError
from chunkcache_api.errors import RequestNotFoundError

Done = Callable[..., None]
"""Called with what a request's account says of its end."""


class RequestLog:
    """Keeps the accounts of the latest requests in memory. Any thread may call any method.

    Args:
        max_requests: How many are kept; beyond that the oldest go.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._lock = threading.Lock()
        self._records: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def get(self, name: str) -> dict[str, Any]:
        """The account of a request.

        Raises:
            RequestNotFoundError: There was none of that id, or it is not kept any more.
        """
        with self._lock:
            record = self._records.get(name)
        if record is None:
            raise RequestNotFoundError(f"there is no request {name!r}", param="id")
        return record

    @contextmanager
    def following(self, name: str, record: dict[str, Any]) -> Iterator[Done]:
        """Account for a request while the body of the ``with`` runs; a failure is noted.

        Args:
            name: Its id.
            record: What is known at its start.
        """
        self._put(name, record | {"status": "running"})
        end: dict[str, Any] = {}
        try:
            yield end.update
        except BaseException as error:
            code = error.code if isinstance(error, ChunkCacheError) else ChunkCacheError.code
            status = "cancelled" if isinstance(error, RequestCancelledError) else "failed"
            self._put(name, record | {"status": status, "error": {"code": code}})
            raise
        self._put(name, record | {"status": "completed"} | end)

    def _put(self, name: str, record: dict[str, Any]) -> None:
        if not self._max_requests:
            return
        with self._lock:
            self._records[name] = record
            while len(self._records) > self._max_requests:
                self._records.popitem(last=False)
