"""Requests that wait for the engine: owners take turns, and their tokens are bounded."""

import threading
from collections import OrderedDict, deque

from chunkcache.engine.request import ActiveRequest
from chunkcache.errors import QueueFullError


class WaitingRequests:
    """What the engine begins next.

    The requests of one owner begin in the order they came. Owners take turns, so that one with many
    requests does not keep another waiting for more than one of them. Answers that are to begin
    again go before all others.

    Only :meth:`announce` is for other threads than the engine's.

    Args:
        max_tokens: Prompt tokens that may wait. A request that finds nothing waiting is taken
            whatever its size.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._num_tokens = 0
        self._first: deque[ActiveRequest] = deque()
        self._by_owner: OrderedDict[bytes, deque[ActiveRequest]] = OrderedDict()

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._first or self._by_owner)

    def announce(self, request: ActiveRequest) -> None:
        """Make room for a request that :meth:`append` will bring.

        Raises:
            QueueFullError: Too many tokens wait.
        """
        num_tokens = _num_tokens(request)
        with self._lock:
            if self._num_tokens and self._num_tokens + num_tokens > self._max_tokens:
                raise QueueFullError(
                    f"{self._num_tokens} prompt tokens wait, and with {num_tokens} more they would "
                    f"be over {self._max_tokens}; try again later"
                )
            self._num_tokens += num_tokens

    def append(self, request: ActiveRequest) -> None:
        """Have a request wait behind its owner's others."""
        self._by_owner.setdefault(request.job.owner, deque()).append(request)

    def put_first(self, request: ActiveRequest) -> None:
        """Have an answer that is to begin again go next."""
        self._first.appendleft(request)

    def head(self) -> ActiveRequest:
        """What begins next; the same until it is taken, unless an answer is put first."""
        if self._first:
            return self._first[0]
        return next(iter(self._by_owner.values()))[0]

    def take(self) -> ActiveRequest:
        """Take the head; the next owner has its turn then."""
        if self._first:
            return self._first.popleft()
        owner, requests = self._by_owner.popitem(last=False)
        request = requests.popleft()
        if requests:
            self._by_owner[owner] = requests
        self._forget(request)
        return request

    def take_cancelled(self) -> list[ActiveRequest]:
        """Take every request whose reader gave up."""
        self._first, taken = _without_cancelled(self._first)
        for owner, requests in list(self._by_owner.items()):
            kept, cancelled = _without_cancelled(requests)
            for request in cancelled:
                self._forget(request)
            taken += cancelled
            if kept:
                self._by_owner[owner] = kept
            else:
                del self._by_owner[owner]
        return taken

    def _forget(self, request: ActiveRequest) -> None:
        with self._lock:
            self._num_tokens -= _num_tokens(request)


def _without_cancelled(
    requests: deque[ActiveRequest],
) -> tuple[deque[ActiveRequest], list[ActiveRequest]]:
    kept: deque[ActiveRequest] = deque()
    cancelled: list[ActiveRequest] = []
    for request in requests:
        # Asked once: a reader may give up at any moment.
        (cancelled if request.stream.is_cancelled else kept).append(request)
    return kept, cancelled


def _num_tokens(request: ActiveRequest) -> int:
    return request.job.plan.layout.num_tokens
