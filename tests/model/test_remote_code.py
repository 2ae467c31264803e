"""Python code that comes with a model: not run, unless asked for, and then only where it helps."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chunkcache.errors import GateFailedError, UnsupportedModelError
from chunkcache.model.gate import check_gate, run_gate
from chunkcache.model.loading import load_model
from chunkcache.model_opening import outline_configured_model
from chunkcache.settings import load_settings

CODE = """
from pathlib import Path

from transformers import {base}Config, {base}ForCausalLM

Path({marker!r}).touch()


class OwnConfig({base}Config):
    model_type = "tests-own"


class OwnForCausalLM({base}ForCausalLM):
    config_class = OwnConfig
{body}"""
DOUBLED = """
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output
"""

Write = Callable[..., Path]


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that is there once the code has run."""
    return tmp_path / "ran"


@pytest.fixture
def write_model(
    model_dir: Callable[..., Path], tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Write]:
    """A model directory with code of its own; what the library copies of it goes when it ends."""
    copies = tmp_path / "copies"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(copies))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(
        name: str, *, base: str = "Llama", body: str = "", model_type: str = "tests-own"
    ) -> Path:
        model = Path(shutil.copytree(model_dir(), tmp_path / name))
        code = CODE.format(base=base, body=body, marker=str(marker))
        (model / "own.py").write_text(code)
        config = json.loads((model / "config.json").read_text())
        config |= {
            "model_type": model_type,
            "auto_map": {
                "AutoConfig": "own.OwnConfig",
                "AutoModelForCausalLM": "own.OwnForCausalLM",
            },
        }
        (model / "config.json").write_text(json.dumps(config))
        return model

    yield write
    for name in [n for n in sys.modules if n.startswith("transformers_modules")]:
        del sys.modules[name]


def _load(model: Path, tmp_path: Path, **options: Any) -> Any:
    return load_model(str(model), cache_dir=tmp_path / "cache", **options)


def test_code_is_not_run_and_the_message_says_how(
    write_model: Write, marker: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match="CHUNKCACHE_TRUST_REMOTE_CODE=1") as caught:
        _load(write_model("own"), tmp_path)
    assert "auto_map" in caught.value.message
    assert not marker.exists()


def test_trusted_code_on_a_supported_family(
    write_model: Write, marker: Path, tmp_path: Path
) -> None:
    """It is run, said to be, part of the identity, and held to the gate like any other."""
    model = write_model("own")
    lines: list[str] = []
    loaded = _load(model, tmp_path, trust_remote_code=True, progress=lines.append)
    assert marker.exists()
    assert any("Python code that comes with own" in line for line in lines)
    assert loaded.runner.spec.family.name == "Llama"
    assert type(loaded.runner.hf_model).__module__.startswith("transformers_modules.")
    report = run_gate(loaded.runner)
    assert report.passed
    (model / "helper.py").write_text("# more of it\n")
    changed = _load(model, tmp_path, trust_remote_code=True)
    assert changed.runner.digest != loaded.runner.digest


def test_trusted_code_with_another_forward_fails_the_gate(
    write_model: Write, tmp_path: Path
) -> None:
    loaded = _load(write_model("doubled", body=DOUBLED), tmp_path, trust_remote_code=True)
    with pytest.raises(GateFailedError):
        check_gate(run_gate(loaded.runner))


def test_trusted_code_on_another_family_is_refused(write_model: Write, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="not in the table"):
        _load(write_model("other", base="Olmo3"), tmp_path, trust_remote_code=True)


@pytest.mark.parametrize("trust_remote_code", [False, True])
def test_code_that_is_not_needed_is_never_run(
    write_model: Write, marker: Path, tmp_path: Path, trust_remote_code: bool
) -> None:
    """The library knows the model type itself: its own class serves, as many Phi-3 want it."""
    model = write_model("known", model_type="llama")
    loaded = _load(model, tmp_path, trust_remote_code=trust_remote_code)
    assert run_gate(loaded.runner).passed
    assert not marker.exists()


def test_code_that_fails_is_a_model_error(write_model: Write, tmp_path: Path) -> None:
    model = write_model("broken")
    (model / "own.py").write_text("import no_such_package_anywhere\n")
    with pytest.raises(UnsupportedModelError, match="own code"):
        _load(model, tmp_path, trust_remote_code=True)


def test_trusted_code_of_another_repository_is_refused(
    write_model: Write, marker: Path, tmp_path: Path
) -> None:
    """Its text would be no part of the identity."""
    model = write_model("own")
    elsewhere = Path(shutil.copytree(model, tmp_path / "elsewhere"))
    path = model / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {k: f"{elsewhere}--{v}" for k, v in config["auto_map"].items()}
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="another repository"):
        _load(model, tmp_path, trust_remote_code=True)
    assert not marker.exists()


def test_an_outline_runs_what_loading_would_run(write_model: Write, tmp_path: Path) -> None:
    model, settings = write_model("own"), {"cache_dir": tmp_path / "cache"}
    trusting = load_settings(model=str(model), trust_remote_code=True, **settings)
    outline = outline_configured_model(trusting, lambda line: None)
    assert outline.spec.family.name == "Llama"
    with pytest.raises(UnsupportedModelError, match="CHUNKCACHE_TRUST_REMOTE_CODE=1"):
        outline_configured_model(load_settings(model=str(model), **settings), lambda line: None)
