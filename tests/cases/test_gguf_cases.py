"""Case tests R14 and R15: a GGUF file gives the same model, or is refused before it costs anything."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from chunkcache.errors import ModelError, ModelFilesError, UnsupportedModelError
from chunkcache.model.gate import run_gate
from chunkcache.model.loading import load_model

QuantType = gguf.GGMLQuantizationType

_ARCHITECTURES = {"llama": "llama", "phi3": "phi3", "gemma2": "gemma2", "qwen3_moe": "qwen3moe"}
"""By ``model_type``, the name in a GGUF file."""


def _gguf_tensors(source: Path, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """A model's tensors as a GGUF file has them."""
    family = config["model_type"]
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[_ARCHITECTURES[family]], config["num_hidden_layers"])
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in sorted(load_file(source / "model.safetensors").items()):
        data = tensor.float().numpy()
        if ".experts." in name:
            before, _, number, what, _ = name.rsplit(".", 4)
            parts = experts.setdefault(f"{before}.experts.{what}.weight", [])
            assert int(number) == len(parts)
            parts.append(data)
            continue
        if family == "llama" and "q_proj" in name:
            data = _interleaved(data, config["num_attention_heads"])
        elif family == "llama" and "k_proj" in name:
            data = _interleaved(data, config["num_key_value_heads"])
        elif family == "gemma2" and "norm" in name:
            data = data + 1
        tensors[name] = data
    tensors |= {name: np.stack(parts) for name, parts in experts.items()}
    found = {names.get_name(name, (".weight",)): data for name, data in tensors.items()}
    assert None not in found
    return {str(name): np.ascontiguousarray(data) for name, data in found.items()}


def _interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a projection in GGUF's order: the pairs that are rotated together lie together."""
    heads = weight.reshape(num_heads, 2, -1, weight.shape[-1])
    return heads.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    source: Path,
    *,
    quant: Any = QuantType.F32,
    architecture: str | None = None,
    pre_tokenizer: str = "gpt-2",
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write a tiny model's directory as one GGUF file; matrices are quantised, norms are not."""
    config = json.loads((source / "config.json").read_text())
    definition = json.loads((source / "tokenizer.json").read_text())
    family = config["model_type"]
    writer = gguf.GGUFWriter(path, architecture or _ARCHITECTURES[family])
    writer.add_name("tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rotated = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(config["head_dim"] * rotated))
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    vocab = definition["model"]["vocab"]
    special = {t["content"] for t in definition["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens]
    )
    merges = definition["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    extra(writer)
    if family == "gemma2":
        writer.add_key_length(config["head_dim"])
        writer.add_sliding_window(config["sliding_window"])
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    elif family == "phi3" and config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])
    elif family == "qwen3_moe":
        writer.add_key_length(config["head_dim"])
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    for name, data in _gguf_tensors(source, config).items():
        if data.ndim == 1 or quant == QuantType.F32:
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, gguf.quantize(data, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("quant", "tolerance"), [(QuantType.F32, 1e-5), (QuantType.F16, 5e-3), (QuantType.Q8_0, 5e-2)]
)
@torch.inference_mode()
def test_R14_gguf_and_safetensors_are_one_model(
    make_bench: Any, model_dir: Any, tmp_path: Path, quant: Any, tolerance: float
) -> None:
    """Both give the same keys behind the rotation, up to what dequantising loses.

    They share no entry: their weights differ as bytes.
    """
    source = model_dir()
    plain = make_bench(load_model(str(source), cache_dir=tmp_path / "cache"))
    path = write_gguf(tmp_path / "tiny.gguf", source, quant=quant)
    converted = make_bench(load_model(str(path), cache_dir=tmp_path / "cache"))
    text = "The door code is 4017, isn't it?"
    ids = plain.model.tokenizer.encode_content(text)
    assert converted.model.tokenizer.encode_content(text) == ids
    ids = (*ids, *plain.draw(40, 1))
    for ours, theirs in zip(plain.plain_kv(ids), converted.plain_kv(ids), strict=True):
        assert (ours - theirs).abs().max() <= tolerance * ours.abs().max()
    run = converted.run(converted.plan([plain.draw(30, 2), plain.draw(9, 3)], "none"))
    k, _ = converted.plain_kv(run.layout.token_ids)
    assert (run.k[0] - k[0]).abs().max() <= 1e-5
    assert plain.runner.digest != converted.runner.digest


FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {
        "vocab_size": 424,  # the library adds to a Gemma tokenizer what this one lacks
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": 7.0,
        "tie_word_embeddings": True,
    },
    "phi3": {"partial_rotary_factor": 1.0, "sliding_window": 24},
    "qwen3_moe": {"moe_intermediate_size": 768, "mlp_only_layers": []},
}
"""What the conversion needs a tiny model to be like."""


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_R14_families_from_gguf(
    make_bench: Any, model_dir: Any, tmp_path: Path, family: str
) -> None:
    """The converted model's logits are those of the model that the file was written from."""
    source = model_dir(family, **FAMILIES[family])
    plain = make_bench(load_model(str(source), cache_dir=tmp_path / "cache"))
    path = write_gguf(tmp_path / "tiny.gguf", source)
    converted = make_bench(load_model(str(path), cache_dir=tmp_path / "cache"))
    ids = plain.draw(60, 1)
    assert (converted.plain_logits(ids) - plain.plain_logits(ids)).abs().max() <= 1e-4
    assert converted.runner.spec == plain.runner.spec
    assert run_gate(converted.runner).passed


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        ("gemma2", {"tie_word_embeddings": True}, "key_length 16"),
        ("phi3", FAMILIES["phi3"] | {"partial_rotary_factor": 0.5}, "rotates 8 of each head's 16"),
        ("qwen3_moe", FAMILIES["qwen3_moe"] | {"moe_intermediate_size": 48}, "length 48"),
    ],
)
def test_R15_what_the_conversion_would_lose_is_refused(
    model_dir: Any, tmp_path: Path, family: str, config: dict[str, Any], reason: str
) -> None:
    """Facts that the library takes its own defaults for: refused by name, nothing is left."""
    path = write_gguf(tmp_path / "tiny.gguf", model_dir(family, **config))
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(str(path), cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache" / "models").glob("*"))


def test_R15_mixtral_is_not_taken_for_a_llama(model_dir: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", model_dir(), extra=lambda w: w.add_expert_count(4))
    with pytest.raises(UnsupportedModelError, match="expert_count 4"):
        load_model(str(path), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("pre_tokenizer", ["llama-bpe", "qwen2", "smollm", "gpt-2"])
def test_R14_pre_tokenizers(model_dir: Any, tmp_path: Path, pre_tokenizer: str) -> None:
    """Digits, contractions and lines are cut as the rule says that the file names."""
    path = write_gguf(tmp_path / "tiny.gguf", model_dir(), pre_tokenizer=pre_tokenizer)
    tokenizer = load_model(str(path), cache_dir=tmp_path / "cache").tokenizer
    rules = {
        "llama-bpe": r"\d{1,3}| ?\D+",
        "qwen2": r"\d| ?\D+",
        "smollm": r"\d| ?\D+",
        "gpt-2": r".+",
    }
    text = "code 40175"
    pieces = re.findall(rules[pre_tokenizer], text)
    apart = tuple(i for piece in pieces for i in tokenizer.encode_content(piece))
    assert tokenizer.encode_content(text) == apart
    assert tokenizer.decode(apart) == text


def test_R15_an_unknown_pre_tokenizer_is_refused(model_dir: Any, tmp_path: Path) -> None:
    """A GGUF that splits text in a way that is not known is refused by name; nothing is left."""
    path = write_gguf(tmp_path / "tiny.gguf", model_dir(), pre_tokenizer="jais")
    with pytest.raises(UnsupportedModelError, match="jais"):
        load_model(str(path), cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache" / "models").glob("*"))


@pytest.mark.parametrize("num_bytes", [0, 3, 4, 25, 1000, 20_000])
def test_R15_half_a_file_is_refused(model_dir: Any, tmp_path: Path, num_bytes: int) -> None:
    """A GGUF that ends early, wherever, is refused as unreadable; nothing is left."""
    path = write_gguf(tmp_path / "tiny.gguf", model_dir())
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ModelError):
        load_model(str(path), cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache" / "models").glob("*"))


def test_R15_no_room_for_the_copy(
    model_dir: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the full-precision copy would not fit, the message says how large it is."""
    path = write_gguf(tmp_path / "tiny.gguf", model_dir(), quant=QuantType.Q8_0)
    num_elements = sum(int(t.n_elements) for t in gguf.GGUFReader(path).tensors)
    free = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("chunkcache.model.draft.shutil.disk_usage", lambda _: free)
    with pytest.raises(ModelFilesError, match=f"{4 * num_elements:,}"):
        load_model(str(path), cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache" / "models").glob("*"))


def test_R15_an_interrupted_conversion_leaves_nothing(
    model_dir: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion that dies half way is as if it had never begun; the next one succeeds."""
    path = write_gguf(tmp_path / "tiny.gguf", model_dir())
    with monkeypatch.context() as patched:

        def fail(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        patched.setattr("safetensors.torch.save_file", fail)
        with pytest.raises(KeyboardInterrupt):
            load_model(str(path), cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache" / "models").glob("*"))
    load_model(str(path), cache_dir=tmp_path / "cache")
    (kept,) = (tmp_path / "cache" / "models").glob("*")
    assert (kept / "model.safetensors").is_file()
