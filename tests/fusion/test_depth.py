"""Chosen rows may end before the last layers: what runs then, what is renewed, what it costs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from chunkcache.fusion.policies.registry import PolicyOptions, make_policy
from chunkcache.fusion.policy import end_layer

NUM_LAYERS = 6


@pytest.mark.parametrize(
    ("depth", "num_layers", "layer"),
    [
        (1.0, 30, None),
        (0.8, 30, 24),
        (0.95, 30, None),
        (0.94, 30, 28),
        (0.5, 6, 3),
        (0.01, 6, 1),
        (0.8, 4, None),
        (0.8, 2, None),
        (0.5, 1, None),
    ],
)
def test_a_depth_is_a_layer_before_the_last_or_none(
    depth: float, num_layers: int, layer: int | None
) -> None:
    assert end_layer(depth, num_layers) == layer


@pytest.mark.parametrize("name", ["query", "hybrid"])
def test_rows_are_renewed_up_to_their_end_and_stale_behind_it(
    bench_of: Callable[..., Any], name: str
) -> None:
    """Against the same rows run to the end: the same bits up to the end layer, then the bits of
    ``none`` in chunks; the question's rows run everywhere."""
    bench = bench_of("llama", num_hidden_layers=NUM_LAYERS)
    chunks = [bench.draw(n, i) for i, n in enumerate((20, 14, 25))]
    stale = bench.run(bench.plan(chunks, "none"))
    whole = bench.run(bench.plan(chunks, name, recompute_ratio=0.3, depth=1.0))
    ended = bench.run(bench.plan(chunks, name, recompute_ratio=0.3, depth=0.5))
    end = end_layer(0.5, NUM_LAYERS)
    assert end == 3
    context = [p for s in ended.layout.chunks for p in range(s.start, s.end)]
    for one, other, first in ((ended.k, whole.k, stale.k), (ended.v, whole.v, stale.v)):
        assert torch.equal(one[: end + 1], other[: end + 1])
        assert torch.equal(one[end + 1 :, context], first[end + 1 :, context])
        assert not torch.equal(one[end, context], first[end, context])
    question = list(ended.layout.query_positions)
    assert not torch.equal(ended.v[-1, question], stale.v[-1, question])
    assert not torch.equal(ended.outcome.logits, whole.outcome.logits)
    reports = [run.outcome.report for run in (ended, whole)]
    assert reports[0].account == reports[1].account, "rows count as recomputed where they began"
    saved = reports[1].charged_ratio - reports[0].charged_ratio
    assert saved == pytest.approx(
        reports[0].account.recomputed_tokens * (NUM_LAYERS - 1 - end) / (NUM_LAYERS * len(context))
    )


@pytest.mark.parametrize("name", ["query", "hybrid"])
def test_all_rows_never_end_early(bench_of: Callable[..., Any], name: str) -> None:
    bench = bench_of("llama", num_hidden_layers=NUM_LAYERS)
    chunks = [bench.draw(n, i) for i, n in enumerate((20, 14))]
    run = bench.run(bench.plan(chunks, name, recompute_ratio=1.0, depth=0.3))
    assert run.outcome.report.exact
    plain = bench.plain_logits(run.layout.token_ids)[-1]
    assert (run.outcome.logits - plain).abs().max() <= 1e-4


def test_policies_say_how_deep_they_run() -> None:
    for name in ("query", "hybrid"):
        assert "depth=0.8" in str(make_policy(name, PolicyOptions(), 0.1))
        assert "depth=0.6" in str(make_policy(name, PolicyOptions(depth=0.6), 0.1))
