"""What the engine begins next: owners take turns, tokens are bounded."""

from types import SimpleNamespace
from typing import Any

import pytest

from chunkcache.engine.waiting import WaitingRequests
from chunkcache.errors import QueueFullError


class FakeRequest:
    """As much of a request as the queue looks at."""

    def __init__(self, owner: str, num_tokens: int = 1) -> None:
        layout = SimpleNamespace(num_tokens=num_tokens)
        self.job = SimpleNamespace(owner=owner.encode(), plan=SimpleNamespace(layout=layout))
        self.stream = SimpleNamespace(is_cancelled=False)


def waiting(*requests: Any, max_tokens: int = 100) -> WaitingRequests:
    queue = WaitingRequests(max_tokens)
    for request in requests:
        queue.announce(request)
        queue.append(request)
    return queue


def take_all(queue: WaitingRequests) -> list[Any]:
    taken = []
    while queue:
        head = queue.head()
        assert queue.take() is head
        taken.append(head)
    return taken


def test_owners_take_turns_and_each_keeps_its_order() -> None:
    a1, a2, a3, b1, b2, c1 = (FakeRequest(owner) for owner in "aaabbc")
    assert take_all(waiting(a1, a2, a3, b1, b2, c1)) == [a1, b1, c1, a2, b2, a3]


def test_who_comes_late_waits_for_one_request_of_another() -> None:
    busy = [FakeRequest("a") for _ in range(20)]
    queue: Any = waiting(*busy)
    assert queue.take() is busy[0]
    late: Any = FakeRequest("b")
    queue.announce(late)
    queue.append(late)
    assert queue.take() is busy[1]
    assert queue.take() is late
    assert take_all(queue) == busy[2:]


def test_what_begins_again_goes_first() -> None:
    a1, b1, again = FakeRequest("a"), FakeRequest("b"), FakeRequest("c")
    queue: Any = waiting(a1, b1)
    queue.put_first(again)
    assert take_all(queue) == [again, a1, b1]


def test_cancelled_requests_leave_with_their_tokens() -> None:
    a1, a2, b1, again = (FakeRequest(owner, 40) for owner in "aabc")
    queue: Any = waiting(a1, a2, max_tokens=80)
    with pytest.raises(QueueFullError):
        queue.announce(b1)
    queue.put_first(again)
    a1.stream.is_cancelled = again.stream.is_cancelled = True
    assert queue.take_cancelled() == [again, a1]
    queue.announce(b1)
    queue.append(b1)
    assert take_all(queue) == [a2, b1]


def test_a_large_request_is_taken_where_nothing_waits() -> None:
    large: Any = FakeRequest("a", 1_000)
    queue = waiting(large)
    with pytest.raises(QueueFullError, match="1000 prompt tokens wait"):
        queue.announce(FakeRequest("b"))  # type: ignore[arg-type]
    assert take_all(queue) == [large]
    queue.announce(large)
