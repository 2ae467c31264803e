"""The window: in order, several at a time, bounded by tokens, nothing left under way."""

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from chunkcache.entry_window import MAX_TOKENS, EntryWindow
from chunkcache.errors import DrainingError
from chunkcache.identity import EntryIdentity, ModelDigest, TenantNamespace


def _identity(name: int, num_tokens: int = 10) -> EntryIdentity:
    ids = (name,) * num_tokens
    return EntryIdentity(ModelDigest(b"m"), TenantNamespace(b"n"), "alone", (), "raw", ids)


@pytest.fixture
def window() -> Iterator[EntryWindow]:
    window = EntryWindow()
    yield window
    window.close()


def test_results_come_in_order_though_the_work_is_done_together(window: EntryWindow) -> None:
    together = threading.Barrier(3)

    def work(identity: EntryIdentity) -> int:
        together.wait(30)
        return identity.token_ids[0]

    assert list(window.each([_identity(i) for i in range(3)], work)) == [0, 1, 2]


def test_no_more_tokens_are_under_way_than_memory_is_for(window: EntryWindow) -> None:
    lock, under_way, most = threading.Lock(), 0, 0

    def work(identity: EntryIdentity) -> None:
        nonlocal under_way, most
        with lock:
            under_way += len(identity.token_ids)
            most = max(most, under_way)
        with lock:
            under_way -= len(identity.token_ids)

    half = MAX_TOKENS // 2 + 1
    list(window.each([_identity(i, half) for i in range(8)], work))
    assert most == half, "two do not fit"
    list(window.each([_identity(9, MAX_TOKENS * 2)], work))
    assert most == MAX_TOKENS * 2, "one that is too large goes alone"


def test_the_first_failure_ends_it_once_nothing_is_under_way(window: EntryWindow) -> None:
    done: list[int] = []
    begun, failed = threading.Event(), threading.Event()

    def work(identity: EntryIdentity) -> int:
        name = identity.token_ids[0]
        if name == 1:
            assert begun.wait(30)
            failed.set()
            raise KeyError(name)
        begun.set()
        assert failed.wait(30)
        done.append(name)
        return name

    with pytest.raises(KeyError):
        list(window.each([_identity(1), _identity(2)], work))
    assert done == [2]
    assert list(window.each([_identity(3)], work)) == [3], "its room was given back"


def test_leaving_early_waits_for_what_is_under_way(window: EntryWindow) -> None:
    begun: list[int] = []

    def work(identity: EntryIdentity) -> int:
        begun.append(identity.token_ids[0])
        return identity.token_ids[0]

    with closing(window.each((_identity(i, MAX_TOKENS) for i in range(100)), work)) as each:
        assert next(each) == 0
    num_begun = len(begun)
    assert num_begun < 100
    assert list(window.each([_identity(7, MAX_TOKENS)], work)) == [7]
    assert len(begun) == num_begun + 1


def test_a_closed_window_refuses(window: EntryWindow) -> None:
    window.close()
    for _ in range(2):
        with pytest.raises(DrainingError):
            list(window.each([_identity(1, MAX_TOKENS)], lambda i: None))
