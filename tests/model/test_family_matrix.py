"""Every family with every rotation it can have: equal to the library's forward, or refused.

The tiny models get norms and biases of random values, or a norm in the wrong place would not tell.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from chunkcache.engine.decode import DecodeRow, DecodeTile
from chunkcache.testing import TINY_FAMILIES
from chunkcache_eval.models.cells import (
    CELLS,
    PROMPT_TOKENS,
    cell_config,
    randomise_vectors,
)
from chunkcache_eval.models.matrix import measure_cell

WINDOWED = [
    ("mistral", {"sliding_window": 20}),
    ("mixtral", {"sliding_window": 20}),
    ("phi3", {"sliding_window": 20}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 20}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 20}),
]
SHAPES = {
    "one KV head": {"num_key_value_heads": 1},
    "a KV head each": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 48},
    "tied": {"tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def bench_with_random_vectors(
    bench_of: Callable[..., Any],
) -> Callable[..., Any]:
    """Benches whose norm weights and biases are of no special value, each made once."""
    made: dict[str, Any] = {}

    def make(family: str, **config: Any) -> Any:
        name = repr((family, config))
        if name not in made:
            bench = bench_of(family, seed=5, **config)
            randomise_vectors(bench.runner.hf_model)
            made[name] = bench
        return made[name]

    return make


def _assert_full_is_the_plain_forward(bench: Any, num_tokens: int = PROMPT_TOKENS) -> None:
    chunks = [bench.draw(num_tokens * 2 // 3, 1), bench.draw(num_tokens // 3, 2)]
    for policy, options in (("full", {}), ("hybrid", {"recompute_ratio": 1.0})):
        run = bench.run(bench.plan(chunks, policy, **options))
        plain = bench.plain_logits(run.layout.token_ids)[-1]
        assert (run.outcome.logits - plain).abs().max() <= 1e-4
        assert run.outcome.logits.argmax() == plain.argmax()


def _assert_layer_0_is_exact(bench: Any) -> None:
    chunks = [bench.draw(64, 1), bench.draw(1, 2), bench.draw(33, 3)]
    for policy in ("none", "query"):
        run = bench.run(bench.plan(chunks, policy))
        k, v = bench.plain_kv(run.layout.token_ids)
        assert (run.k[0] - k[0]).abs().max() <= 1e-5
        assert (run.v[0] - v[0]).abs().max() <= 1e-5
        assert run.outcome.logits.isfinite().all()


@pytest.mark.parametrize(("family", "rope"), CELLS)
def test_full_and_layer_0_are_exact(
    bench_with_random_vectors: Callable[..., Any], family: str, rope: str
) -> None:
    bench = bench_with_random_vectors(family, **cell_config(family, rope))
    _assert_full_is_the_plain_forward(bench)
    _assert_layer_0_is_exact(bench)


@pytest.mark.parametrize(("family", "rope"), CELLS)
def test_what_is_measured_is_within_its_limit(
    family: str, rope: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As ``chunkcache eval models`` measures it: logits, keys at every offset, half precision."""
    cell = measure_cell(family, rope, tmp_path_factory.mktemp("cell"))
    assert cell.max_logit_diff <= 1e-4
    assert cell.layer0_k_diff <= 1e-5
    assert cell.bf16_noise > 0
    assert cell.passed, cell


@pytest.mark.parametrize(("family", "config"), WINDOWED)
def test_windows_of_every_family(
    bench_with_random_vectors: Callable[..., Any], family: str, config: dict[str, Any]
) -> None:
    bench = bench_with_random_vectors(family, **config)
    assert 20 in bench.runner.spec.windows
    _assert_full_is_the_plain_forward(bench)
    _assert_layer_0_is_exact(bench)


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_heads_of_any_form(
    bench_with_random_vectors: Callable[..., Any], family: str, shape: str
) -> None:
    bench = bench_with_random_vectors(family, **SHAPES[shape])
    _assert_full_is_the_plain_forward(bench, 40)


@pytest.mark.parametrize("num_tokens", [63, 64, 65])
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text"])
def test_longrope_around_its_switch(
    bench_with_random_vectors: Callable[..., Any], family: str, num_tokens: int
) -> None:
    bench = bench_with_random_vectors(family, **cell_config(family, "longrope"))
    assert bench.runner.spec.rope.switch_tokens == 64
    fixed = bench.plan([bench.draw(1, 1)], "none").layout.num_tokens - 1
    chunks = [bench.draw(num_tokens - fixed, 1)]
    run = bench.run(bench.plan(chunks, "none"))
    assert run.layout.num_tokens == num_tokens
    k, _ = bench.plain_kv(run.layout.token_ids)
    assert (run.k[0] - k[0]).abs().max() <= 1e-5
    run = bench.run(bench.plan(chunks, "full"))
    plain = bench.plain_logits(run.layout.token_ids)[-1]
    assert (run.outcome.logits - plain).abs().max() <= 1e-4


@pytest.mark.parametrize("family", TINY_FAMILIES)
@torch.inference_mode()
def test_decoding_equals_the_library_s(
    bench_with_random_vectors: Callable[..., Any], family: str
) -> None:
    """Behind a full prefill, token by token through ``attend_decode``, beside another answer."""
    bench = bench_with_random_vectors(family)
    plan = bench.plan([bench.draw(50, 1), bench.draw(20, 2)], "full")
    prompt = plan.layout.token_ids
    first = int(bench.run(plan).outcome.logits.argmax())
    pages = bench.pool.allocate(len(prompt) + 8)
    other = bench.pool.allocate(10)
    assert pages is not None
    assert other is not None
    with pages, other:
        bench.fill(pages, prompt)
        bench.fill(other, prompt[:3])
        tile = DecodeTile(bench.runner, bench.pool, 4)
        ids, stranger = [first], 40
        for position in range(len(prompt), len(prompt) + 7):
            rows = [
                DecodeRow(stranger, position - len(prompt) + 3, other),
                DecodeRow(ids[-1], position, pages),
            ]
            alone = tile.step(rows[1:])[0]
            beside = tile.step(rows)
            assert torch.equal(alone, beside[1]), "an answer's bits depend on its company"
            ids.append(int(alone.argmax()))
            plain = bench.plain_logits((*prompt, *ids[:-1]))[-1]
            assert (alone - plain).abs().max() <= 1e-4
            assert int(plain.argmax()) == ids[-1]


def test_variations_within_families(bench_with_random_vectors: Callable[..., Any]) -> None:
    """Dense layers between blocks of experts, no soft-caps, other layers without a rotation."""
    for family, config in (
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 0]}),
    ):
        bench = bench_with_random_vectors(family, **config)
        _assert_full_is_the_plain_forward(bench)
        _assert_layer_0_is_exact(bench)
