"""Work beside the engine's leaves no thread, and so no OpenMP pool, behind."""

import threading
from collections.abc import Callable

import pytest

from chunkcache import model_opening
from chunkcache.chunk_cache import ChunkCache
from chunkcache.model.gate import GateReport, run_gate
from chunkcache.model.runner import ModelRunner
from chunkcache.short_thread import on_short_thread


def test_a_task_runs_elsewhere_and_its_thread_ends() -> None:
    thread = on_short_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_what_a_task_raises_is_raised() -> None:
    def fail() -> None:
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        on_short_thread(fail)


def test_the_gate_leaves_no_pool_behind(
    open_cache: Callable[..., ChunkCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def watched(runner: ModelRunner) -> GateReport:
        threads.append(threading.current_thread())
        return run_gate(runner)

    monkeypatch.setattr(model_opening, "run_gate", watched)
    open_cache()
    assert [t.is_alive() for t in threads] == [False]
