"""Case tests R14 and R15: a GGUF file gives the same model, or is refused before it costs anything."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from chunkcache.errors import ModelError, ModelFilesError, UnsupportedModelError
from chunkcache.model.loading import load_model

QuantType = gguf.GGMLQuantizationType

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _gguf_name(name: str) -> str:
    outside = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in outside:
        return outside[name]
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def _interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a projection in GGUF's order: the pairs that are rotated together lie together."""
    heads = weight.reshape(num_heads, 2, -1, weight.shape[-1])
    return heads.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    source: Path,
    *,
    quant: Any = QuantType.F32,
    architecture: str = "llama",
    pre_tokenizer: str = "gpt-2",
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write a tiny Llama's directory as one GGUF file; matrices are quantised, norms are not."""
    config = json.loads((source / "config.json").read_text())
    definition = json.loads((source / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
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
    for name, tensor in load_file(source / "model.safetensors").items():
        data = tensor.float().numpy()
        if "q_proj" in name:
            data = _interleaved(data, config["num_attention_heads"])
        elif "k_proj" in name:
            data = _interleaved(data, config["num_key_value_heads"])
        if data.ndim == 1 or quant == QuantType.F32:
            writer.add_tensor(_gguf_name(name), np.ascontiguousarray(data))
        else:
            writer.add_tensor(_gguf_name(name), gguf.quantize(data, quant), raw_dtype=quant)
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
