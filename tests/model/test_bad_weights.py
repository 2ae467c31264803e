"""Weights that are not what they should be: one clear line each, and nothing loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chunkcache.errors import ModelError, ModelFilesError
from chunkcache.model.loading import load_model
from chunkcache.model.weight_files import load_weights, unchanged

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def copy(model_dir: Callable[..., Path], tmp_path: Path) -> Path:
    """A model directory of the test's own."""
    return Path(shutil.copytree(model_dir(), tmp_path / "model"))


@pytest.fixture
def sharded(copy: Path) -> Path:
    """The same model in two files with an index."""
    tensors = load_file(copy / "model.safetensors")
    weight_map = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), 1):
        name = f"model-{number:05}-of-00002.safetensors"
        save_file({n: tensors[n] for n in names}, copy / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    (copy / "model.safetensors").unlink()
    return copy


def _load(path: Path, tmp_path: Path) -> Any:
    return load_model(str(path), cache_dir=tmp_path / "cache")


def _refusal(path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(ModelError) as caught:
        _load(path, tmp_path)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 600
    assert capfd.readouterr().err == ""
    return caught.value.message


def _edit_config(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


def _edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = {n: t.clone() for n, t in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _edit_index(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((path / "model.safetensors.index.json").read_text())
    change(index)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_give_what_one_file_gives(
    sharded: Path, load_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    whole, parts = load_tiny().runner.hf_model, _load(sharded, tmp_path).runner.hf_model
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, parts.get_parameter(name))


@pytest.mark.parametrize("num_bytes", [0, 5, 8, 300, -1])
def test_truncated_weights(
    copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], num_bytes: int
) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert "model.safetensors is cut off or damaged" in _refusal(copy, tmp_path, capfd)


def test_a_truncated_or_renamed_shard_is_named(
    sharded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    second = sharded / "model-00002-of-00002.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[:-7])
    assert f"{second.name} is cut off or damaged" in _refusal(sharded, tmp_path, capfd)
    second.write_bytes(whole)
    second.rename(sharded / "other.safetensors")
    assert f"has no {second.name}" in _refusal(sharded, tmp_path, capfd)


def test_shards_that_changed_places(
    sharded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))
    kept = first.rename(sharded / "kept")
    second.rename(first)
    kept.rename(second)
    assert "has no tensor" in _refusal(sharded, tmp_path, capfd)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../model-00001-of-00002.safetensors", "no file beside it"),
        ("/etc/model.safetensors", "no file beside it"),
        (7, "no file beside it"),
        ("absent.safetensors", "has no absent.safetensors"),
    ],
)
def test_an_index_that_names_other_files(
    sharded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: Any, reason: str
) -> None:
    _edit_index(sharded, lambda index: index["weight_map"].update({Q_PROJ: name}))
    assert reason in _refusal(sharded, tmp_path, capfd)


@pytest.mark.parametrize("weight_map", [{}, [], None])
def test_an_index_of_nothing(
    sharded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], weight_map: Any
) -> None:
    _edit_index(sharded, lambda index: index.update(weight_map=weight_map))
    assert "names no files" in _refusal(sharded, tmp_path, capfd)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"intermediate_size": 96}, "[128, 64] in the file, [96, 64] in the model"),
        ({"num_hidden_layers": 1}, "a model without model.layers.1"),
        ({"num_hidden_layers": 3}, "the weights lack model.layers.2"),
        ({"num_key_value_heads": 4}, "other shapes"),
        ({"head_dim": 8}, "other shapes"),
        ({"vocab_size": 500}, "[419, 64] in the file, [500, 64] in the model"),
        ({"attention_bias": True}, "the weights lack"),
        ({"vocab_size": 400}, "the tokenizer has ids up to 418, the model an embedding of 400"),
    ],
)
def test_a_configuration_that_lies(
    copy: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    fields: dict[str, Any],
    reason: str,
) -> None:
    _edit_config(copy, **fields)
    assert reason in _refusal(copy, tmp_path, capfd)


def test_a_tensor_of_another_name_or_shape(
    copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = copy / "model.safetensors"
    _edit_tensors(path, lambda t: t.update({"model.extra.weight": torch.ones(2)}))
    assert "without model.extra.weight" in _refusal(copy, tmp_path, capfd)
    _edit_tensors(path, lambda t: t.pop("model.extra.weight"))
    _edit_tensors(path, lambda t: t.update({Q_PROJ: torch.ones(64, 32)}))
    assert f"{Q_PROJ} ([64, 32] in the file" in _refusal(copy, tmp_path, capfd)
    _edit_tensors(path, lambda t: t.pop(Q_PROJ))
    assert f"the weights lack {Q_PROJ}" in _refusal(copy, tmp_path, capfd)


def test_weights_that_are_no_numbers_fail_the_gate(
    open_cache: Callable[..., Any], copy: Path
) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[Q_PROJ][0, 0] = float("nan")

    _edit_tensors(copy / "model.safetensors", spoil)
    with pytest.raises(ModelError, match="does not reproduce"):
        open_cache(model=copy)


@pytest.mark.parametrize("content", [[], ["README.md"], ["notes.txt", "tokenizer.json"]])
def test_a_directory_without_a_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], content: list[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in content:
        (folder / name).write_text("{}")
    assert "has no config.json" in _refusal(folder, tmp_path, capfd)


def test_a_file_that_changes_while_it_is_loaded(copy: Path) -> None:
    path = copy / "model.safetensors"
    with pytest.raises(ModelFilesError, match="changed while"), unchanged([path]):
        path.write_bytes(path.read_bytes())
    with pytest.raises(ModelFilesError, match="changed while"), unchanged([path]):
        path.unlink()


@torch.inference_mode()
def test_a_file_that_is_rewritten_later_changes_no_loaded_model(copy: Path, tmp_path: Path) -> None:
    """The library maps files: written over in place, they would change a model that runs."""
    path = copy / "model.safetensors"
    model = _load(copy, tmp_path).runner.hf_model
    ids = torch.arange(20, 40)[None]
    before = model(input_ids=ids).logits.clone()
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(path.stat().st_size // 2))
    assert torch.equal(model(input_ids=ids).logits, before)
    with path.open("r+b") as file:
        file.truncate(16)
    assert torch.equal(model(input_ids=ids).logits, before)


def test_a_configuration_that_names_other_weights(
    copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library would load them, and the digest would be of the file beside them."""
    shutil.copy(copy / "model.safetensors", copy / "other.safetensors")
    _edit_config(copy, transformers_weights="other.safetensors")
    assert "transformers_weights" in _refusal(copy, tmp_path, capfd)


def test_a_configuration_that_changes_while_it_is_loaded(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The identity is of the configuration that the model was built by."""
    before = _load(copy, tmp_path)

    def racing(*args: Any, **options: Any) -> Any:
        _edit_config(copy, rms_norm_eps=0.5)
        return load_weights(*args, **options)

    monkeypatch.setattr("chunkcache.model.loading.load_weights", racing)
    loaded = _load(copy, tmp_path)
    assert loaded.runner.hf_model.config.rms_norm_eps == 0.5
    assert loaded.runner.digest != before.runner.digest
    assert loaded.runner.digest == _load(copy, tmp_path).runner.digest
