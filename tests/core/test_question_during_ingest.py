"""A question over a chunk that is being computed for a document at that moment."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from chunkcache.planning import AskOptions


def test_the_engine_does_not_wait_for_an_ingest_that_waits_for_the_engine(
    open_cache: Callable[..., Any], passages: dict[str, str]
) -> None:
    cache = open_cache()
    runtime = cache.runtime
    expected = cache.put("tower", passages["tower"]) and cache.answer(
        "Which code?", ["tower"], max_tokens=4
    )
    identity = cache.plan("", ["tower"], AskOptions()).identities[0]
    runtime.stack.drop([identity.key()])
    started, answered = threading.Event(), threading.Event()

    def prefill() -> Any:
        started.set()
        assert answered.wait(60), "the question waited for this"
        return runtime.engine.call(
            lambda: runtime.prefill.compute(identity, runtime.codec)
        ).result()

    with ThreadPoolExecutor(1) as pool:
        led = pool.submit(lambda: runtime.stack.load_or_prefill(identity, prefill))
        assert started.wait(30)
        answer = cache.answer("Which code?", ["tower"], max_tokens=4)
        answered.set()
        with led.result(60) as lease:
            assert lease.source == "computed"
            entry = lease.entry
    assert answer.token_ids == expected.token_ids
    assert answer.report.documents[0].source == "computed"
    with runtime.stack.load(identity) as lease:
        assert torch.equal(lease.entry.k, entry.k)
    assert runtime.stack.stats().leases_open == 0
