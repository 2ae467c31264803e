"""LoRA adapters: merged as their tensors say, or refused with what is not merged."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chunkcache.errors import ChunkCacheError, ModelFilesError, UnsupportedModelError
from chunkcache.model.adapter import read_adapter
from chunkcache.model.gate import run_gate
from chunkcache.model.loading import LoadedModel, load_model
from chunkcache.testing import write_tiny_adapter

PREFIX = "base_model.model."
Q_PROJ = "model.layers.0.self_attn.q_proj"
IDS = torch.randint(17, 400, (1, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def base(model_dir: Callable[..., Path]) -> Path:
    return model_dir()


@pytest.fixture
def load(cache_dir: Path) -> Callable[..., LoadedModel]:
    return lambda base, **options: load_model(str(base), cache_dir=cache_dir, **options)


def _edit(adapter: Path, **tensors: torch.Tensor | None) -> Path:
    """Set or remove tensors, by their names without PEFT's prefix."""
    path = adapter / "adapter_model.safetensors"
    held = {n: t.clone() for n, t in load_file(path).items()}
    held |= {PREFIX + n: t for n, t in tensors.items() if t is not None}
    for name in [PREFIX + n for n, t in tensors.items() if t is None]:
        del held[name]
    save_file(held, path, metadata={"format": "pt"})
    return adapter


def _weight(model: LoadedModel, name: str) -> torch.Tensor:
    return model.runner.hf_model.get_parameter(name)


def _refusal(load: Callable[..., LoadedModel], base: Path, adapter: Path) -> str:
    with pytest.raises(ChunkCacheError) as caught:
        load(base, adapter=str(adapter))
    assert "\n" not in caught.value.message
    return caught.value.message


@torch.inference_mode()
def test_a_merged_adapter_is_the_base_and_its_updates(
    base: Path, tmp_path: Path, load: Callable[..., LoadedModel]
) -> None:
    """Two ways: 1. the merged model; 2. the base's modules, each with B(A(x)) added to its output."""
    adapter = write_tiny_adapter(tmp_path / "lora", base, rank=4, lora_alpha=6)
    merged = load(base, adapter=str(adapter))
    plain = load(base)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." not in name:
            continue
        b = tensors[name.replace("lora_A", "lora_B")]
        module = plain.runner.hf_model.get_submodule(
            name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        )
        module.register_forward_hook(
            lambda _, args, out, a=a, b=b: out + 1.5 * (args[0] @ a.T) @ b.T
        )
    want = plain.runner.hf_model(input_ids=IDS).logits
    got = merged.runner.hf_model(input_ids=IDS).logits
    assert (got - want).abs().max() <= 1e-4
    assert (got - load(base).runner.hf_model(input_ids=IDS).logits).abs().max() > 1
    assert run_gate(merged.runner).passed
    assert merged.adapter is not None
    assert merged.adapter.name == "lora"
    assert merged.runner.name == f"{base.name}+lora"


def test_scales_and_ranks_by_pattern(
    base: Path, tmp_path: Path, load: Callable[..., LoadedModel]
) -> None:
    adapter = write_tiny_adapter(
        tmp_path / "lora",
        base,
        rank=4,
        modules=("q_proj", "down_proj"),
        lora_alpha=8,
        use_rslora=True,
        rank_pattern={"layers.0.self_attn.q_proj": 2},
        alpha_pattern={r"layers\.0\.mlp\.down_proj": 3, "q_proj": 5},
    )
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 64, generator=generator), torch.randn(64, 2, generator=generator)
    _edit(adapter, **{f"{Q_PROJ}.lora_A.weight": a, f"{Q_PROJ}.lora_B.weight": b})
    merged, plain = load(base, adapter=str(adapter)), load(base)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for module, scale in {
        Q_PROJ: 5 / math.sqrt(2),
        "model.layers.1.self_attn.q_proj": 5 / math.sqrt(4),
        "model.layers.0.mlp.down_proj": 3 / math.sqrt(4),
        "model.layers.1.mlp.down_proj": 8 / math.sqrt(4),
    }.items():
        a, b = (tensors[f"{PREFIX}{module}.lora_{part}.weight"] for part in "AB")
        name = f"{module}.weight"
        want = _weight(plain, name) + scale * (b @ a)
        assert torch.allclose(_weight(merged, name), want, atol=1e-5), module


def test_dora_brings_rows_to_their_learned_length(
    base: Path, tmp_path: Path, load: Callable[..., LoadedModel]
) -> None:
    adapter = write_tiny_adapter(tmp_path / "lora", base, modules=("o_proj",), use_dora=True)
    lengths = {
        f"model.layers.{layer}.self_attn.o_proj.lora_magnitude_vector": torch.rand(64) + 0.5
        for layer in (0, 1)
    }
    _edit(adapter, **lengths)
    merged = load(base, adapter=str(adapter))
    for name, wanted in lengths.items():
        weight = _weight(merged, name.replace("lora_magnitude_vector", "weight"))
        assert torch.allclose(weight.norm(dim=1), wanted, atol=1e-5)


def test_modules_saved_whole_take_the_place_of_the_base_s(
    base: Path, tmp_path: Path, load: Callable[..., LoadedModel]
) -> None:
    adapter = write_tiny_adapter(tmp_path / "lora", base, modules_to_save=["lm_head"])
    head, norm = torch.randn(419, 64), torch.randn(64)
    _edit(adapter, **{"lm_head.weight": head, "model.layers.0.input_layernorm.weight": norm})
    merged = load(base, adapter=str(adapter))
    assert torch.equal(_weight(merged, "lm_head.weight"), head)
    assert torch.equal(_weight(merged, "model.layers.0.input_layernorm.weight"), norm)


def test_biases_and_fused_projections(
    model_dir: Callable[..., Path], tmp_path: Path, load: Callable[..., LoadedModel]
) -> None:
    qwen, phi = model_dir("qwen2"), model_dir("phi3")
    biased = write_tiny_adapter(tmp_path / "biased", qwen, modules=("q_proj",), bias="lora_only")
    bias = torch.randn(64)
    _edit(biased, **{f"{Q_PROJ}.base_layer.bias": bias})
    assert torch.equal(_weight(load(qwen, adapter=str(biased)), f"{Q_PROJ}.bias"), bias)
    fused = write_tiny_adapter(tmp_path / "fused", phi, modules=("qkv_proj", "gate_up_proj"))
    merged = load(phi, adapter=str(fused))
    tensors = load_file(fused / "adapter_model.safetensors")
    module = "model.layers.1.self_attn.qkv_proj"
    a, b = (tensors[f"{PREFIX}{module}.lora_{part}.weight"] for part in "AB")
    want = _weight(load(phi), f"{module}.weight") + 2 * (b @ a)
    assert torch.allclose(_weight(merged, f"{module}.weight"), want, atol=1e-5)
    assert run_gate(merged.runner).passed


@pytest.mark.parametrize("part", ["head", "embedding"])
def test_a_tied_head_and_embedding_part_when_one_changes(
    model_dir: Callable[..., Path], tmp_path: Path, load: Callable[..., LoadedModel], part: str
) -> None:
    base = model_dir(tie_word_embeddings=True)
    adapter = write_tiny_adapter(tmp_path / "lora", base, modules=("q_proj",))
    a, b = torch.randn(4, 64), torch.randn(419, 4)
    if part == "head":
        _edit(adapter, **{"lm_head.lora_A.weight": a, "lm_head.lora_B.weight": b})
        update = 2 * (b @ a)
    else:
        _edit(
            adapter,
            **{
                "model.embed_tokens.lora_embedding_A": b.T.contiguous(),
                "model.embed_tokens.lora_embedding_B": a.T.contiguous(),
            },
        )
        update = 2 * (b @ a)
    merged, plain = load(base, adapter=str(adapter)), load(base)
    names = ["lm_head.weight", "model.embed_tokens.weight"]
    changed, kept = names if part == "head" else reversed(names)
    old = _weight(plain, "model.embed_tokens.weight")
    assert torch.allclose(_weight(merged, changed), old + update, atol=1e-5)
    assert torch.equal(_weight(merged, kept), old)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"peft_type": None}, "only LORA"),
        ({"init_lora_weights": "pissa"}, "changes the base's weights"),
        ({"init_lora_weights": 3}, "changes the base's weights"),
        ({"fan_in_fan_out": True}, "transposed"),
        ({"lora_bias": True}, "biases of its own"),
        ({"layer_replication": [[0, 2]]}, "repeats layers"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "experts"),
        ({"trainable_token_indices": [1]}, "single rows"),
        ({"alora_invocation_tokens": [5]}, "from certain tokens on"),
        ({"a_later_invention": {"x": 1}}, "a_later_invention: not known here"),
        ({"r": None}, "no usable r"),
        ({"r": 0}, "no usable r"),
        ({"lora_alpha": "much"}, "no usable r"),
        ({"rank_pattern": ["q_proj"]}, "no usable r"),
        ({"alpha_pattern": {"(": 2}}, "is no pattern"),
        ({"use_dora": True}, "not complete"),
        ({"base_model_name_or_path": "somebody/other-model"}, "somebody/other-model"),
    ],
)
def test_what_is_not_merged_is_refused_with_the_reason(
    base: Path,
    tmp_path: Path,
    load: Callable[..., LoadedModel],
    config: dict[str, Any],
    reason: str,
) -> None:
    adapter = write_tiny_adapter(tmp_path / "lora", base, **config)
    assert reason in _refusal(load, base, adapter)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({f"{Q_PROJ}.lora_B.weight": None}, "not complete"),
        ({f"{Q_PROJ}.lora_A.weight": torch.ones(4, 32)}, "[4, 64]"),
        ({f"{Q_PROJ}.lora_A.weight": torch.ones(8, 64)}, "[4, 64]"),
        ({f"{Q_PROJ}.weight": torch.ones(64, 64)}, "there twice"),
        ({f"{Q_PROJ}.lora_C.weight": torch.ones(1)}, "lora_C"),
        ({"lm_head.weight": torch.ones(420, 64)}, "[419, 64]"),
        ({"model.layers.7.self_attn.q_proj.weight": torch.ones(64, 64)}, "which the model has not"),
        ({"model.embed_tokens.base_layer.weight": torch.ones(419, 64)}, "the model's differs"),
        ({"model.norm.lora_A.weight": torch.ones(4, 64)}, "not complete"),
    ],
)
def test_tensors_without_a_place_are_refused(
    base: Path,
    tmp_path: Path,
    load: Callable[..., LoadedModel],
    tensors: dict[str, torch.Tensor | None],
    reason: str,
) -> None:
    adapter = _edit(write_tiny_adapter(tmp_path / "lora", base), **tensors)
    assert reason in _refusal(load, base, adapter)


def test_an_adapter_of_another_shape_of_base_is_refused(
    base: Path, model_dir: Callable[..., Path], tmp_path: Path, load: Callable[..., LoadedModel]
) -> None:
    other = model_dir(hidden_size=32, intermediate_size=64)
    adapter = write_tiny_adapter(tmp_path / "lora", other, base_model_name_or_path=None)
    assert "for another base" in _refusal(load, base, adapter)


@pytest.mark.parametrize(
    "name", ["{base}", "owner/{name}", "/elsewhere/{name}/", "", "{name}.Q4_K_M.gguf"]
)
def test_names_that_are_the_base_s(
    base: Path, tmp_path: Path, load: Callable[..., LoadedModel], name: str
) -> None:
    adapter = write_tiny_adapter(
        tmp_path / "lora",
        base,
        base_model_name_or_path=name.format(base=base, name=base.name.upper()),
    )
    assert load(base, adapter=str(adapter)).adapter is not None


def test_pickled_adapters_are_refused_with_what_to_do(
    base: Path, tmp_path: Path, load: Callable[..., LoadedModel]
) -> None:
    adapter = write_tiny_adapter(tmp_path / "lora", base)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    message = _refusal(load, base, adapter)
    assert "adapter_model.bin is a pickle file" in message
    assert "safe_serialization=True" in message


@pytest.mark.parametrize("num_bytes", [0, 7, 200, -1])
def test_a_truncated_adapter_is_refused(
    base: Path, tmp_path: Path, load: Callable[..., LoadedModel], num_bytes: int
) -> None:
    path = write_tiny_adapter(tmp_path / "lora", base) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert "cannot be read" in _refusal(load, base, path.parent)


def test_no_adapter_there_and_an_adapter_as_a_model(
    base: Path, tmp_path: Path, load: Callable[..., LoadedModel]
) -> None:
    assert "no adapter directory" in _refusal(load, base, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "adapter_config.json" in _refusal(load, base, tmp_path / "empty")
    adapter = write_tiny_adapter(tmp_path / "lora", base)
    (adapter / "config.json").write_text((base / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match="give its base as the model"):
        load(adapter)


def test_an_adapter_is_named_by_what_it_does(base: Path, tmp_path: Path) -> None:
    """Neither its name, nor where it was trained, nor how, is part of it; every number is."""
    adapter = write_tiny_adapter(tmp_path / "lora", base)
    first = read_adapter(adapter, "lora").digest
    moved = Path(shutil.copytree(adapter, tmp_path / "moved"))
    config = json.loads((moved / "adapter_config.json").read_text())
    config |= {"base_model_name_or_path": "elsewhere", "lora_dropout": 0.3, "peft_version": "9"}
    (moved / "adapter_config.json").write_text(json.dumps(config))
    assert read_adapter(moved, "moved").digest == first
    for change in ({"lora_alpha": 9}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}):
        (moved / "adapter_config.json").write_text(json.dumps(config | change))
        assert read_adapter(moved, "moved").digest != first
    other = write_tiny_adapter(tmp_path / "other", base, seed=1)
    assert read_adapter(other, "lora").digest != first


def test_every_adapter_is_another_model(
    base: Path, tmp_path: Path, load: Callable[..., LoadedModel]
) -> None:
    adapters = [write_tiny_adapter(tmp_path / f"lora-{seed}", base, seed=seed) for seed in (0, 1)]
    models = [load(base), *(load(base, adapter=str(a)) for a in adapters)]
    assert len({m.runner.digest for m in models}) == 3


def test_a_missing_config_is_named(base: Path, tmp_path: Path) -> None:
    adapter = write_tiny_adapter(tmp_path / "lora", base)
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(ModelFilesError, match=r"adapter_config\.json"):
        read_adapter(adapter, "lora")


def test_the_order_of_patterns_is_part_of_the_name(base: Path, tmp_path: Path) -> None:
    """Of two that fit a module the first one scales it."""
    adapter = write_tiny_adapter(tmp_path / "adapter", base)
    path = adapter / "adapter_config.json"
    config, patterns = json.loads(path.read_text()), [("q_proj", 1.0), (r".*\.q_proj", 9.0)]
    found = []
    for alpha_pattern in (patterns, patterns[::-1]):
        path.write_text(json.dumps(config | {"alpha_pattern": dict(alpha_pattern)}))
        found.append(read_adapter(adapter, "adapter"))
    first, second = found
    assert first.config.scale_of(Q_PROJ) != second.config.scale_of(Q_PROJ)
    assert first.digest != second.digest
