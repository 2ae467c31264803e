"""Int8 weights: close to the weights they come from, exact where exactness is promised."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkcache.errors import InvalidValueError, UnsupportedModelError
from chunkcache.model.gate import run_gate
from chunkcache.model.int8 import Int8Linear
from chunkcache.model.loading import LoadedModel, load_model


@pytest.fixture
def load(model_dir: Callable[..., Path], cache_dir: Path) -> Callable[..., LoadedModel]:
    def make(family: str = "llama", quantisation: Any = "int8", **options: Any) -> LoadedModel:
        return load_model(
            str(model_dir(family)), cache_dir=cache_dir, quantisation=quantisation, **options
        )

    return make


def _linear(num_in: int, num_out: int, seed: int = 0, *, bias: bool = True) -> torch.nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.nn.Linear(num_in, num_out, bias=bias)


@torch.inference_mode()
@given(
    shape=st.sampled_from([(64, 64), (33, 7), (128, 1), (1, 5), (96, 419), (48, 3)]),
    batch=st.sampled_from([(), (1,), (3,), (2, 5), (0,), (37,)]),
    seed=st.integers(0, 9),
    bias=st.booleans(),
)
def test_a_product_is_that_of_the_rounded_weights(
    shape: tuple[int, int], batch: tuple[int, ...], seed: int, bias: bool
) -> None:
    linear = _linear(*shape, seed, bias=bias)
    layer = Int8Linear(linear)
    x = torch.randn(*batch, shape[0], generator=torch.Generator().manual_seed(seed))
    weight = layer.rows[:, : shape[0]].float() * layer.scales[:, None]
    assert ((weight - linear.weight).abs() <= layer.scales[:, None] * 0.5001).all()
    want = torch.nn.functional.linear(x, weight, linear.bias)
    got = layer(x)
    assert got.shape == want.shape
    assert got.dtype == x.dtype
    # Inputs and outputs are rounded to bf16 once each.
    bound = torch.nn.functional.linear(x.abs(), weight.abs()) * 2**-7 + 1e-6
    assert ((got - want).abs() <= bound).all()


@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company() -> None:
    layer = Int8Linear(_linear(192, 96))
    x = torch.randn(300, 192, generator=torch.Generator().manual_seed(1))
    whole = layer(x)
    for num_rows in (1, 2, 3, 4, 5, 37, 64, 257):
        assert torch.equal(layer(x[:num_rows]), whole[:num_rows])


def test_rows_of_zeros_stay_zeros() -> None:
    linear = _linear(64, 8, bias=False)
    with torch.no_grad():
        linear.weight[3] = 0
    assert (Int8Linear(linear)(torch.randn(2, 64))[:, 3] == 0).all()


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "olmo2", "gemma2", "gemma3_text"])
def test_families_pass_the_gate_and_layer_0_is_exact(
    load: Callable[..., LoadedModel], family: str
) -> None:
    model = load(family)
    report = run_gate(model.runner)
    assert report.passed
    assert report.layer0_difference <= 1e-5
    own = load(family, quantisation="none")
    ids = torch.randint(17, 400, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits, want = (
            m.runner.hf_model(input_ids=ids).logits.log_softmax(-1) for m in (model, own)
        )
    kl = (want.exp() * (want - logits)).sum(-1).mean()
    assert 0 < kl < 0.02


def test_int8_is_another_model_and_says_so(load: Callable[..., LoadedModel]) -> None:
    models = [load(quantisation="none"), load(), load(dtype="bfloat16")]
    assert len({m.runner.digest for m in models}) == 3
    assert [m.weights_facts()["quantisation"] for m in models] == ["none", "int8", "int8"]
    assert [m.weights_facts()["dtype"] for m in models] == ["float32", "float32", "bfloat16"]
    assert models[1].runner.dtype == torch.float32
    assert run_gate(models[2].runner).passed


def test_where_int8_is_not_for(load: Callable[..., LoadedModel]) -> None:
    with pytest.raises(InvalidValueError, match="CPU"):
        load(device="cuda")
    with pytest.raises(UnsupportedModelError, match="experts"):
        load("mixtral")


def test_answers_are_a_function_of_the_request(
    open_cache: Callable[..., Any], passages: dict[str, str]
) -> None:
    """Cold, from RAM, from disk, alone or beside others: the same tokens; other entries than fp32's."""
    plain = open_cache()
    plain.put("tower", passages["tower"])
    plain.close()
    cache = open_cache(quantisation="int8")
    cold = cache.answer("Who keeps the key?", ["tower"], max_tokens=12)
    assert cold.report.documents[0].source == "computed"
    warm = cache.answer("Who keeps the key?", ["tower"], max_tokens=12)
    streams = [cache.stream("Who keeps the key?", ["tower"]) for _ in range(3)]
    beside = [s.answer().token_ids[:12] for s in streams]
    cache.close()
    again = open_cache(quantisation="int8").answer("Who keeps the key?", ["tower"], max_tokens=12)
    assert again.report.documents[0].source == "disk"
    assert {warm.token_ids, again.token_ids, *beside} == {cold.token_ids}
