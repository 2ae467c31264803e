"""Invariant 4: the same request gives the same bits, wherever its entries come from."""

from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch

from chunkcache.engine.sampling import SamplingParams
from chunkcache.planning import AskOptions

QUESTION = "When was the bridge built?"


def _ask(cache: Any, names: list[str], **options: Any) -> Any:
    return cache.stream(QUESTION, names, AskOptions(max_tokens=12, **options)).finished()


@pytest.mark.parametrize("codec", ["raw", "bf16", "int8", "fp8"])
@pytest.mark.parametrize("policy", ["none", "hybrid", "deviation", "shift"])
def test_cold_host_disk_and_restart_give_the_same_bits(
    open_cache: Callable[..., Any],
    model_dir: Callable[..., Any],
    passages: dict[str, str],
    codec: str,
    policy: str,
) -> None:
    """On three layers: what a policy does behind its check layer counts too."""
    open_cache = partial(open_cache, model=model_dir(num_hidden_layers=3))
    names = list(passages)
    cache = open_cache(codec=codec)
    for name, text in passages.items():
        cache.put(name, text)
    identities = cache.plan(QUESTION, names, AskOptions()).identities
    cache.runtime.stack.drop([i.key() for i in identities])
    cold = _ask(cache, names, policy=policy)
    assert {d.source for d in cold.report.documents} == {"computed"}
    host = _ask(cache, names, policy=policy)
    assert {d.source for d in host.report.documents} == {"host"}
    cache.close()

    restarted = open_cache(codec=codec)
    disk = _ask(restarted, names, policy=policy)
    assert {d.source for d in disk.report.documents} == {"disk"}
    restarted.close()

    small = open_cache(codec=codec, host_tier_bytes=0)
    for _ in range(2):
        always_disk = _ask(small, names, policy=policy)
        assert {d.source for d in always_disk.report.documents} == {"disk"}
        assert torch.equal(always_disk.first_logits, cold.first_logits)
    for other in (host, disk):
        assert torch.equal(other.first_logits, cold.first_logits)
        assert other.token_ids == cold.token_ids


def test_entries_of_several_codecs_live_in_one_store(
    open_cache: Callable[..., Any], passages: dict[str, str]
) -> None:
    """Each codec's answer is its own, whatever other codecs' entries lie beside its entries."""
    names = list(passages)
    first: dict[str, Any] = {}
    for codec in ("raw", "int8", "bf16", "fp8"):
        cache = open_cache(codec=codec)
        for name, text in passages.items():
            cache.put(name, text)
        first[codec] = _ask(cache, names, policy="none")
        cache.close()
    logits = [a.first_logits for a in first.values()]
    assert not any(torch.equal(a, b) for a, b in combinations(logits, 2))
    for codec, before in first.items():
        cache = open_cache(codec=codec)
        again = _ask(cache, names, policy="none")
        assert {d.source for d in again.report.documents} == {"disk"}
        assert torch.equal(again.first_logits, before.first_logits)
        assert cache.runtime.stack.stats().bytes["disk"] > 0
        cache.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_alone_and_in_company_give_the_same_answers(
    open_cache: Callable[..., Any], passages: dict[str, str], temperature: float
) -> None:
    """Seven other requests decode in the same tiles."""
    cache = open_cache()
    for name, text in passages.items():
        cache.put(name, text)
    names = list(passages)
    sampling = SamplingParams(temperature=temperature, seed=5)
    alone = _ask(cache, names, sampling=sampling)
    options = [
        AskOptions(max_tokens=5 + 3 * i, sampling=SamplingParams(temperature=0.5, seed=i))
        for i in range(7)
    ]
    orders = [names, names[::-1], names[:1], names[1:]]
    streams = [
        cache.stream(f"Question {i}?", orders[i % 4], how) for i, how in enumerate(options[:4])
    ]
    mine = cache.stream(QUESTION, names, AskOptions(max_tokens=12, sampling=sampling))
    streams += [
        cache.stream(f"Question {i}?", orders[i % 4], how) for i, how in enumerate(options[4:], 4)
    ]
    company = mine.finished()
    for stream in streams:
        stream.finished()
    assert torch.equal(company.first_logits, alone.first_logits)
    assert company.token_ids == alone.token_ids
    assert company.text == alone.text


def test_every_step_s_logits_are_bit_identical_in_company(
    load_tiny: Callable[..., Any], make_bench: Callable[..., Any]
) -> None:
    """The decode tile itself: one live row, then the same row among others, in any place."""
    from chunkcache.engine.decode import DecodeRow, DecodeTile
    from chunkcache.fusion.cost import CostMeter
    from chunkcache.fusion.recompute import SequenceKV, finish_rows, run_rows

    bench = make_bench(load_tiny("llama"), page_tokens=4)
    tile = DecodeTile(bench.runner, bench.pool, 4)
    rows = []
    with torch.inference_mode():
        for index, num_tokens in enumerate((50, 3, 17, 29)):
            pages = bench.pool.allocate(num_tokens + 1)
            ids = torch.tensor(bench.draw(num_tokens, index))
            sequence = SequenceKV.over(
                bench.runner, bench.pool.k, bench.pool.v, pages.slots[:num_tokens]
            )
            steps = run_rows(
                bench.runner, sequence, ids, torch.arange(num_tokens), cost=CostMeter(2)
            )
            finish_rows(steps)
            rows.append(DecodeRow(20 + index, num_tokens, pages))
        alone = tile.step(rows[:1])[0]
        for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0], [2, 3, 0]):
            logits = tile.step([rows[i] for i in order])
            assert torch.equal(logits[order.index(0)], alone)


def test_twenty_repeats_are_identical(
    open_cache: Callable[..., Any], passages: dict[str, str]
) -> None:
    """Also with requests in between that move the host tier's contents."""
    cache = open_cache(host_tier_bytes=40_000)
    for name, text in passages.items():
        cache.put(name, text)
    names = list(passages)
    first = _ask(cache, names)
    for index in range(20):
        if index % 3 == 0:
            _ask(cache, names[::-1], policy="lego")
        again = _ask(cache, names)
        assert again.token_ids == first.token_ids
        assert torch.equal(again.first_logits, first.first_logits)
    assert cache.runtime.stack.stats().evictions > 0
