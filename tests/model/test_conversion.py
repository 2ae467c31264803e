"""Pickled checkpoints: refused, converted on command, and never run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from chunkcache.errors import ModelFilesError
from chunkcache.model.conversion import convert_model
from chunkcache.model.loading import load_model


def _quiet(line: str) -> None:
    del line


@pytest.fixture
def pickled(model_dir: Callable[..., Path], tmp_path: Path) -> Path:
    """A tiny model whose weights are pickled, with its head tied to its embedding."""
    source = Path(shutil.copytree(model_dir(tie_word_embeddings=True), tmp_path / "pickled"))
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin")
    return source


def _shard(source: Path) -> None:
    """Split a pickled checkpoint in two, with its index."""
    tensors = torch.load(source / "pytorch_model.bin", weights_only=True)
    (source / "pytorch_model.bin").unlink()
    weight_map = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), 1):
        file = f"pytorch_model-{number:05}-of-00002.bin"
        torch.save({name: tensors[name] for name in names}, source / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("is_old", [False, True])
def test_a_converted_model_is_the_same_model(
    pickled: Path, tmp_path: Path, is_sharded: bool, is_old: bool
) -> None:
    tensors = torch.load(pickled / "pytorch_model.bin", weights_only=True)
    if is_old:
        torch.save(tensors, pickled / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    if is_sharded:
        _shard(pickled)
    lines: list[str] = []
    target = tmp_path / "converted"
    converted = convert_model(pickled, target, lines.append)
    assert converted.directory == target
    assert converted.num_tensors == len(tensors)
    files = sorted(p.name for p in target.glob("*.safetensors*"))
    assert len(files) == (3 if is_sharded else 1)
    assert len(lines) == (2 if is_sharded else 1)
    assert not list(target.glob("pytorch_model*"))
    found: dict[str, torch.Tensor] = {}
    for path in target.glob("*.safetensors"):
        found |= load_file(path)
    assert _same(found, tensors)
    loaded = load_model(str(target), cache_dir=tmp_path / "cache")
    assert loaded.tokenizer.encode_content("The harbour")
    assert {p.name for p in pickled.glob("*.json")} - {"pytorch_model.bin.index.json"} <= {
        p.name for p in target.glob("*.json")
    }


def test_views_and_transposed_tensors_are_written_as_they_read(
    pickled: Path, tmp_path: Path
) -> None:
    base = torch.arange(24.0)
    odd = {"part": base[3:9], "turned": base.reshape(4, 6).T, "all": base, "half": base.half()}
    torch.save(odd, pickled / "pytorch_model.bin")
    convert_model(pickled, tmp_path / "out", _quiet)
    assert _same(load_file(tmp_path / "out" / "model.safetensors"), odd)


class _Hostile:
    """What unpickling would run."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str, ...]]:
        import os

        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_that_would_run_something_is_refused(
    pickled: Path, tmp_path: Path, is_zip: bool
) -> None:
    marker = tmp_path / "ran"
    torch.save(
        {"weight": _Hostile(marker)},
        pickled / "pytorch_model.bin",
        _use_new_zipfile_serialization=is_zip,
    )
    with pytest.raises(ModelFilesError, match="more than tensors"):
        convert_model(pickled, tmp_path / "out", _quiet)
    assert not marker.exists()
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".converting-*"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"weight": torch.zeros(2), "step": 7}, "'step', a int"),
        ({"state_dict": {"weight": torch.zeros(2)}}, "'state_dict', a dict"),
        ([torch.zeros(2)], "a list"),
        ({"weight": torch.zeros(2, 2).to_sparse()}, "no plain tensor"),
        ({"weight": torch.zeros(1).expand(10**13)}, "no plain tensor"),
        ({"weight": torch.zeros(2, dtype=torch.complex128)}, "no plain tensor"),
        ({"weight": torch.zeros(2, dtype=torch.uint8).view(torch.bits8)}, "cannot be written"),
    ],
)
def test_anything_but_tensors_by_name_is_refused(
    pickled: Path, tmp_path: Path, content: Any, reason: str
) -> None:
    torch.save(content, pickled / "pytorch_model.bin")
    with pytest.raises(ModelFilesError, match=reason):
        convert_model(pickled, tmp_path / "out", _quiet)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("num_bytes", [0, 1, 100, 5000])
def test_half_a_file_is_refused(pickled: Path, tmp_path: Path, num_bytes: int) -> None:
    path = pickled / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ModelFilesError, match=r"pytorch_model\.bin"):
        convert_model(pickled, tmp_path / "out", _quiet)
    assert not (tmp_path / "out").exists()


def test_shards_are_files_of_the_directory(pickled: Path, tmp_path: Path) -> None:
    _shard(pickled)
    index = pickled / "pytorch_model.bin.index.json"
    for name in ("../elsewhere.bin", "missing.bin"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ModelFilesError, match="has no"):
            convert_model(pickled, tmp_path / "out", _quiet)
    index.write_text("{}")
    with pytest.raises(ModelFilesError, match="weight_map"):
        convert_model(pickled, tmp_path / "out", _quiet)


def test_what_stands_in_the_way_is_left_alone(pickled: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "notes.txt").write_text("keep")
    with pytest.raises(ModelFilesError, match="there already"):
        convert_model(pickled, target, _quiet)
    assert [p.name for p in target.iterdir()] == ["notes.txt"]


def test_sources_without_anything_to_convert(
    pickled: Path, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelFilesError, match="loaded as it is"):
        convert_model(model_dir(), tmp_path / "out", _quiet)
    with pytest.raises(ModelFilesError, match="no model directory"):
        convert_model(tmp_path / "nowhere", tmp_path / "out", _quiet)
    with pytest.raises(ModelFilesError, match="no GGUF file"):
        convert_model(tmp_path / "no.gguf", tmp_path / "out", _quiet)
    (pickled / "pytorch_model.bin").unlink()
    with pytest.raises(ModelFilesError, match=r"no pytorch_model\.bin"):
        convert_model(pickled, tmp_path / "out", _quiet)


def test_no_room(pickled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("chunkcache.model.draft.shutil.disk_usage", lambda _: free)
    with pytest.raises(ModelFilesError, match="1,000 are free"):
        convert_model(pickled, tmp_path / "new" / "out", _quiet)
    assert not (tmp_path / "new").exists()


def test_an_interrupted_conversion_leaves_nothing(
    pickled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    _shard(pickled)
    with monkeypatch.context() as patched:
        patched.setattr("safetensors.torch.save_file", fail)
        with pytest.raises(KeyboardInterrupt):
            convert_model(pickled, tmp_path / "out", _quiet)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pickled"]
    convert_model(pickled, tmp_path / "out", _quiet)


def test_tensors_that_share_memory_need_room_for_each(
    pickled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = torch.zeros(1000)
    torch.save({f"copy-{i}": base for i in range(1000)}, pickled / "pytorch_model.bin")
    free = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr("chunkcache.model.draft.shutil.disk_usage", lambda _: free)
    with pytest.raises(ModelFilesError, match="4,000,000 bytes"):
        convert_model(pickled, tmp_path / "out", _quiet)
    assert not (tmp_path / "out").exists()


def test_an_index_of_other_files_does_not_come_along(pickled: Path, tmp_path: Path) -> None:
    """A directory that had the weights in another format too, of which the index was left."""
    _shard(pickled)
    other = {"metadata": {}, "weight_map": {"a": "model-00001-of-00009.safetensors"}}
    (pickled / "model.safetensors.index.json").write_text(json.dumps(other))
    out = tmp_path / "out"
    convert_model(pickled, out, _quiet)
    load_model(str(out), cache_dir=tmp_path / "cache")
    assert not any("-of-00009" in path.read_text() for path in out.glob("*.json"))


def test_bytes_that_are_not_what_they_seem_are_refused(pickled: Path, tmp_path: Path) -> None:
    """An old file whose table of memory names none of the memory that its tensors want."""
    path = pickled / "pytorch_model.bin"
    torch.save({"weight": torch.zeros(2)}, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    tail = whole.rindex(b"X")
    path.write_bytes(whole[: tail + 5] + b"\x00" + whole[tail + 6 :])
    with pytest.raises(ModelFilesError, match="damaged"):
        convert_model(pickled, tmp_path / "out", _quiet)
