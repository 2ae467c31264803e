"""``chunkcache models check``: the gate on the command line, without a store."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from chunkcache.fusion.place import place_entry
from chunkcache.testing import write_tiny_adapter

FIGURES = ("logits_difference", "layer0_difference", "rotation_difference")


def test_a_model_that_reuses_chunks(cli: Any, cli_json: Any, model_dir: Any, store: Path) -> None:
    model = model_dir("gemma3_text")
    body = cli_json("models", "check", model)
    assert (body["model"], body["family"], body["serves"]) == (model.name, "Gemma 3", "reuse")
    assert (body["layers"], body["kv_heads"], body["head_dim"]) == (2, 2, 16)
    assert (body["windows"], body["max_positions"], body["dtype"]) == ([24], 512, "float32")
    gate = body["gate"]
    assert gate["passed"]
    assert all(0 <= gate[name] <= gate["tolerance"] for name in FIGURES)

    result = cli("models", "check", model)
    assert result.exit_code == 0
    assert result.stdout.count("right: differs by") == 3
    assert "reused chunks" in result.stdout
    assert "comparing with the plain forward" in result.stderr
    assert not store.exists()


def test_a_model_that_is_served_in_full_alone(
    cli: Any, cli_json: Any, model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def backwards(sequence: Any, entry: Any, start: int) -> None:
        place_entry(sequence, entry, start)
        sequence.k_pages.neg_()

    monkeypatch.setattr("chunkcache.model.gate.place_entry", backwards)
    body = cli_json("models", "check", model_dir(), exit_code=3)
    assert body["serves"] == "full"
    assert (body["gate"]["passed"], body["gate"]["full_only"]) == (False, True)
    result = cli("models", "check", model_dir())
    assert result.exit_code == 3
    assert "WRONG" in result.stdout
    assert "no reuse" in result.stdout


def test_a_model_that_is_refused(cli_json: Any, tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model("gpt2").save_pretrained(tmp_path / "gpt2")
    body = cli_json("models", "check", tmp_path / "gpt2", exit_code=1)
    assert body["error"]["code"] == "unsupported_model"
    assert "gpt2" in body["error"]["message"]
    assert "no rotary positions" in body["error"]["message"]
    body = cli_json("models", "check", tmp_path / "nothing", exit_code=1)
    assert body["error"]["code"] == "model_files"


def test_the_template_and_its_joints(
    cli: Any, cli_json: Any, model_dir: Any, tmp_path: Path
) -> None:
    template = cli_json("models", "check", model_dir())["template"]
    assert (template["form"], template["system"], template["right"]) == ("chat", "turn", True)
    assert sum(template["changed_joints"].values()) <= template["num_joints"]
    model = Path(shutil.copytree(model_dir(), tmp_path / "no-template"))
    (model / "tokenizer_config.json").unlink()
    assert cli_json("models", "check", model)["template"]["form"] == "plain"
    result = cli("models", "check", model)
    assert "plain text" in result.stdout
    assert "has no chat template" in result.stderr


def test_a_pickled_checkpoint_is_converted(
    cli: Any, cli_json: Any, model_dir: Any, tmp_path: Path
) -> None:
    source, dest = tmp_path / "old", tmp_path / "new"
    shutil.copytree(model_dir(), source)
    tensors = load_file(source / "model.safetensors")
    torch.save(tensors, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    refused = cli_json("models", "check", source, exit_code=1)
    assert refused["error"]["code"] == "model_files"
    assert "chunkcache models convert" in refused["error"]["message"]
    done = cli_json("models", "convert", source, dest)
    assert (done["directory"], done["tensors"]) == (str(dest), len(tensors))
    assert done["weight_bytes"] == (dest / "model.safetensors").stat().st_size
    assert cli_json("models", "check", dest)["serves"] == "reuse"
    assert (
        cli_json("models", "convert", source, dest, exit_code=1)["error"]["code"] == "model_files"
    )
    result = cli("models", "convert", source, tmp_path / "third")
    assert result.exit_code == 0
    assert "models check" in result.stderr


def test_an_adapter_and_int8_weights(
    cli: Any, cli_json: Any, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    base = model_dir()
    adapter = write_tiny_adapter(tmp_path / "support", base)
    options = ("models", "check", base, "--adapter", adapter, "--quantisation", "int8")
    body = cli_json(*options)
    assert body["model"] == f"{base.name}+support"
    assert (body["quantisation"], body["adapter"]["name"]) == ("int8", "support")
    shown = cli(*options).stdout
    assert "weights in int8" in shown
    assert "support (content" in shown
    other = write_tiny_adapter(tmp_path / "other", base, base_model_name_or_path="a/b")
    refused = cli_json("models", "check", base, "--adapter", other, exit_code=1)
    assert refused["error"]["code"] == "model_files"
    assert "'a/b'" in refused["error"]["message"]
