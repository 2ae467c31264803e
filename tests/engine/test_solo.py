"""A request run in steps of its own gives what the same request gives in the engine."""

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch

from chunkcache.engine.request import GenerationJob
from chunkcache.engine.stream import Finished
from chunkcache.planning import AskOptions


def _run_idle(cache: Any, job: GenerationJob) -> Finished:
    found: list[Finished] = []
    engine = cache.runtime.engine

    def work() -> Generator[None, None, None]:
        found.append((yield from engine.solo_steps(job)))

    engine.when_idle(work)
    engine.call(lambda: None).result()
    while engine.idle_counts.waiting:
        engine.call(lambda: None).result()
    return found[0]


@pytest.mark.parametrize("policy", ["full", "hybrid", "none"])
def test_the_bits_are_the_same(
    open_cache: Callable[..., Any], passages: dict[str, str], policy: str
) -> None:
    cache = open_cache()
    for name, text in passages.items():
        cache.put(name, text)
    options = AskOptions(policy=policy, max_tokens=9)
    plan = cache.plan("Who keeps the key?", list(passages), options)
    job = GenerationJob(plan, options.sampling, 9, num_kept_logits=9)
    served = cache.runtime.engine.submit(job).result()
    alone = _run_idle(cache, job)
    assert alone.token_ids == served.token_ids
    assert alone.text == served.text
    assert alone.step_logits is not None
    assert served.step_logits is not None
    assert torch.equal(alone.step_logits, served.step_logits)
    assert cache.runtime.pool.num_free_pages == cache.runtime.pool.num_pages


def test_an_answer_that_crosses_a_switch_of_the_rotation(
    open_cache: Callable[..., Any], model_dir: Callable[..., Any]
) -> None:
    text, question = "The light goes on at dusk.", "When?"
    probe = open_cache("probe")
    probe.put("note", text)
    switch = probe.plan(question, ["note"], AskOptions()).layout.num_tokens + 4
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 256 / switch,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 2.7, 3.4, 4.1],
        "original_max_position_embeddings": switch,
        "partial_rotary_factor": 0.5,
    }
    model = model_dir(
        "phi3",
        max_position_embeddings=256,
        original_max_position_embeddings=switch,
        rope_parameters=rope,
    )
    cache = open_cache(model=model)
    cache.put("note", text)
    options = AskOptions(policy="none", max_tokens=12)
    job = GenerationJob(cache.plan(question, ["note"], options), options.sampling, 12)
    served = cache.runtime.engine.submit(job).result()
    alone = _run_idle(cache, job)
    assert [w.code for w in alone.report.warnings] == ["rotation_switched"]
    assert alone.token_ids == served.token_ids
    assert len(alone.token_ids) == 12
