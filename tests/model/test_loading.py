"""Loading models: what is refused, with which reason; what an identity depends on."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chunkcache.errors import GateFailedError, ModelFilesError, UnsupportedModelError
from chunkcache.model.gate import check_gate, run_gate
from chunkcache.model.loading import load_model
from chunkcache.model.weights_digest import FileDigests
from chunkcache.testing import TINY_FAMILIES


@pytest.fixture
def copy(model_dir: Callable[..., Path], tmp_path: Path) -> Path:
    """A model directory of the test's own."""
    return Path(shutil.copytree(model_dir(), tmp_path / "model"))


def _load(path: Path, tmp_path: Path) -> Any:
    return load_model(str(path), cache_dir=tmp_path / "cache")


def _edit_config(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(copy: Path, tmp_path: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(ModelFilesError, match=name):
        _load(copy, tmp_path)


def test_pickle_checkpoints_are_not_loaded(copy: Path, tmp_path: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelFilesError, match="pickle"):
        _load(copy, tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_that_is_not_text_is_named(copy: Path, tmp_path: Path, name: str) -> None:
    (copy / name).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelFilesError, match=name):
        _load(copy, tmp_path)


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="no model directory"):
        _load(tmp_path / "nowhere", tmp_path)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "never-heard-of"}, "never-heard-of"),
        ({"kv_lora_rank": 8}, "MLA"),
        ({"alibi": True}, "ALiBi"),
        (
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
            "partial",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [1, 1],
                }
            },
            "M-RoPE",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    copy: Path, tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    _edit_config(copy, **fields)
    with pytest.raises(UnsupportedModelError, match=reason):
        _load(copy, tmp_path)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_family_passes_the_gate(load_tiny: Callable[..., Any], family: str) -> None:
    report = run_gate(load_tiny(family).runner)
    assert report.passed
    assert report.logits_difference <= 1e-5
    check_gate(report)


def test_a_broken_forward_fails_the_gate(
    load_tiny: Callable[..., Any], copy: Path, tmp_path: Path
) -> None:
    """A runner that forgets a norm's weight: the logits tell."""
    runner = _load(copy, tmp_path).runner
    original = runner.project

    def project(layer: int, hidden: torch.Tensor) -> Any:
        q, k, v = original(layer, hidden)
        return q, k * 1.05, v

    runner.project = project
    report = run_gate(runner)
    assert not report.passed
    with pytest.raises(GateFailedError, match="does not reproduce"):
        check_gate(report)


def test_a_failed_gate_refuses_the_model(
    open_cache: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import dataclass

    import chunkcache.model_opening
    from chunkcache.model.gate import GateReport

    @dataclass
    class Spoiled:
        def __call__(self, runner: Any) -> GateReport:
            return GateReport(
                model_name="tiny",
                logits_difference=0.5,
                layer0_difference=0.0,
                rotation_difference=0.0,
                tolerance=2e-4,
                num_tokens=76,
                fingerprint="x",
                passed=False,
                full_only=False,
            )

    monkeypatch.setattr(chunkcache.model_opening, "run_gate", Spoiled())
    with pytest.raises(GateFailedError, match=r"0\.5"):
        open_cache()


def test_the_gate_s_result_is_kept(open_cache: Callable[..., Any]) -> None:
    lines: list[str] = []
    open_cache().close()
    open_cache(progress=lines.append)
    assert not [line for line in lines if "checking" in line]


def test_identity_follows_content_not_names(copy: Path, tmp_path: Path) -> None:
    base = _load(copy, tmp_path).runner.digest
    moved = copy.rename(tmp_path / "renamed")
    assert _load(moved, tmp_path).runner.digest == base
    _edit_config(moved, transformers_version="0.0", _name_or_path="elsewhere")
    assert _load(moved, tmp_path).runner.digest == base
    _edit_config(moved, rms_norm_eps=1e-3)
    changed = _load(moved, tmp_path).runner.digest
    assert changed != base
    _edit_config(moved, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert _load(moved, tmp_path).runner.digest not in (base, changed)


def test_a_changed_weight_changes_the_digest(copy: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base = _load(copy, tmp_path).runner.digest
    tensors = load_file(copy / "model.safetensors")
    name = next(n for n in tensors if "q_proj" in n)
    tensors[name][0, 0] += 0.01
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert _load(copy, tmp_path).runner.digest != base


def test_digests_are_remembered_until_the_file_changes(tmp_path: Path) -> None:
    path, memory = tmp_path / "weights", tmp_path / "memory.json"
    path.write_bytes(b"one")
    digests = FileDigests(memory, lambda: time.time_ns() + 10**10)
    first = digests.digest(path)
    remembered = json.loads(memory.read_text())
    remembered[str(path)][-1] = "00" * 32
    memory.write_text(json.dumps(remembered))
    assert digests.digest(path) == bytes(32), "the memory is used"
    path.write_bytes(b"another")
    assert digests.digest(path) not in (first, bytes(32))
    memory.write_text("[not json")
    path.write_bytes(b"one")
    assert digests.digest(path) == first
    assert FileDigests(None).digest(path) == first


def test_a_file_that_has_just_changed_is_hashed_again_next_time(tmp_path: Path) -> None:
    """A second change within the file system's step of time would not show."""
    path, memory = tmp_path / "weights", tmp_path / "memory.json"
    path.write_bytes(b"one")
    digests = FileDigests(memory, lambda: path.stat().st_ctime_ns + 10**9)
    first = digests.digest(path)
    assert not memory.exists()
    FileDigests(memory, lambda: path.stat().st_ctime_ns + 10**10).digest(path)
    assert json.loads(memory.read_text())[str(path)][-1] == first.hex()


def test_the_demo_model_is_what_it_says(demo_model: Any) -> None:
    spec = demo_model.runner.spec
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert spec.max_positions == 8192
    assert demo_model.runner.dtype == torch.float32
    assert demo_model.runner.eos_token_ids == {2}
    report = run_gate(demo_model.runner)
    assert report.passed


def test_a_cache_that_cannot_be_written_costs_a_hash(tmp_path: Path) -> None:
    path, blocked = tmp_path / "weights", tmp_path / "file"
    path.write_bytes(b"abc")
    blocked.touch()
    digests = FileDigests(blocked / "memory.json", lambda: time.time_ns() + 10**10)
    assert digests.digest(path) == FileDigests(None).digest(path)
