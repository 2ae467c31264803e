"""Workers: events in order, errors handed over, cancellation that always arrives."""

import threading

import pytest

from chunkcache.errors import DrainingError, QueueFullError, RequestCancelledError
from chunkcache_api.workers import Claim, WorkerPool, WorkerScope


class Blocking:
    """Work that ends when it is cancelled."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self) -> None:
        self._cancelled.wait()
        raise RequestCancelledError("cancelled")


async def test_events_come_in_order_and_end() -> None:
    pool = WorkerPool(1)

    def produce(scope: WorkerScope) -> None:
        for number in range(100):
            scope.emit(number)

    with pool.start(produce) as worker:
        assert [event async for event in worker] == list(range(100))
    assert pool.num_alive == 0


async def test_an_error_arrives_behind_the_events() -> None:
    def produce(scope: WorkerScope) -> None:
        scope.emit(1)
        raise TimeoutError("its own")

    with WorkerPool(1).start(produce) as worker:
        assert await worker.next_within(30) == 1
        with pytest.raises(TimeoutError, match="its own"):
            await worker.next_within(30)


async def test_silence_is_none_and_loses_nothing() -> None:
    may_emit = threading.Event()

    def produce(scope: WorkerScope) -> None:
        may_emit.wait()
        scope.emit("late")

    with WorkerPool(1).start(produce) as worker:
        assert await worker.next_within(0.01) is None
        may_emit.set()
        assert await worker.next_within(30) == "late"


async def test_leaving_cancels_what_is_attached() -> None:
    pool = WorkerPool(1)

    def produce(scope: WorkerScope) -> None:
        work = Blocking()
        scope.attach(work)
        scope.emit("attached")
        work.run()

    with pool.start(produce) as worker:
        assert await anext(worker) == "attached"
    worker.join()
    assert pool.num_alive == 0


async def test_cancelling_reaches_what_is_attached_afterwards() -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def produce(scope: WorkerScope) -> None:
        begun.set()
        may_go_on.wait()
        scope.attach(Blocking())
        scope.emit("never")

    with WorkerPool(1).start(produce) as worker:
        begun.wait()
        worker.cancel()
        may_go_on.set()
        with pytest.raises(RequestCancelledError):
            await anext(worker)


async def test_a_pool_is_bounded_and_ends_everything() -> None:
    pool = WorkerPool(2)

    def produce(scope: WorkerScope) -> None:
        work = Blocking()
        scope.attach(work)
        work.run()

    workers = [pool.start(produce) for _ in range(2)]
    with pytest.raises(QueueFullError):
        pool.start(produce)
    pool.close()
    assert pool.num_alive == 0
    for worker in workers:
        with pytest.raises(RequestCancelledError):
            await anext(worker)
    with pytest.raises(DrainingError):
        pool.start(produce)


async def test_what_could_not_be_started_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be no thread to be had."""
    pool, claims = WorkerPool(1), [Claim("key:a", 1)]

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            pool.start(lambda scope: None, claims)
    with pool.start(lambda scope: scope.emit(1), claims) as worker:
        assert [event async for event in worker] == [1]
