"""``chunkcache eval models``: one report of the matrix, real models and the digest."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chunkcache_eval.cli import app
from chunkcache_eval.models.matrix import CellResult
from chunkcache_eval.models.run import ModelsReport, ModelsRequest

CELL = CellResult("llama", "default", 1e-6, 1e-7, 0.01, 0.01)


def _run(*args: str) -> Any:
    result = CliRunner().invoke(app, ["eval", "models", *args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_report(
    model_dir: Callable[..., Path], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHUNKCACHE_CACHE_DIR", str(cache_dir))
    model = model_dir(max_position_embeddings=8192)
    args = ("--family", "llama", "--family", "gemma2", "--rope", "llama3", "--digest-mb", "1")
    result = _run(*args, "--model", str(model), "--prompts", "2", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["passed"], report["failures"]) == (True, [])
    assert [(c["family"], c["rope"]) for c in report["matrix"]] == [
        ("llama", "llama3"),
        ("gemma2", "llama3"),
    ]
    assert all(0 <= c["max_logit_diff"] <= 1e-4 for c in report["matrix"])
    assert all(0 <= c["layer0_k_diff"] <= 1e-5 for c in report["matrix"])
    (real,) = report["real"]
    assert (real["num_prompts"], real["num_equal"], real["gate_passed"]) == (2, 2, True)
    (int8,) = report["int8"]
    assert 0 < int8["mean_kl"] < 0.02
    assert int8["decode_tokens_per_second_int8"] > 0
    assert set(report["digest"]) == {
        "megabytes", "cold_seconds", "warm_seconds", "remembered_seconds",
    }  # fmt: skip
    assert "llama with llama3 rotation (1 of 2)" in result.stderr

    table = _run(*args[2:-2], "--digest-mb", "0")
    assert table.exit_code == 0
    assert "gemma2" in table.stdout
    assert "digest of" not in table.stdout


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("--family", "mamba"), "invalid_value"),
        (("--rope", "spiral"), "invalid_value"),
        (("--no-matrix", "--digest-mb", "0", "--model", "/nowhere/at/all"), "model_files"),
    ],
)
def test_what_cannot_be_measured(args: tuple[str, ...], code: str) -> None:
    result = _run(*args, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["code"] == code


@pytest.mark.parametrize(
    "wrong",
    [{"max_logit_diff": 2e-4}, {"layer0_k_diff": 2e-5}, {"bf16_logit_diff": 0.016}],
)
def test_what_is_over_its_limit_fails(
    wrong: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = ModelsReport((CELL, replace(CELL, **wrong)), (), (), None)
    assert report.failures == ["llama with default rotation"]

    def measure(request: ModelsRequest, progress: Any) -> ModelsReport:
        del request, progress
        return report

    monkeypatch.setattr("chunkcache_eval.models.run.measure_models", measure)
    assert _run("--json").exit_code == 3
    assert "WRONG" in _run().stdout


def test_a_difference_that_is_no_number_is_over_its_limit() -> None:
    assert not replace(CELL, max_logit_diff=float("nan")).passed
    assert not replace(CELL, bf16_logit_diff=float("nan")).passed


def test_the_whole_matrix_is_the_default() -> None:
    cells = ModelsRequest().cells
    assert len(cells) == len(set(cells)) == 68
    assert ModelsRequest(with_matrix=False).cells == []


def test_int8_weights_are_said_in_words_and_left_out_where_they_cannot_be(
    model_dir: Callable[..., Path], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHUNKCACHE_CACHE_DIR", str(cache_dir))
    args = ("--no-matrix", "--digest-mb", "0", "--prompts", "1", "--model")
    dense = _run(*args, str(model_dir(max_position_embeddings=8192)))
    assert "with int8 weights: decodes" in dense.stdout
    experts = _run(*args, str(model_dir("mixtral", max_position_embeddings=8192)))
    assert experts.exit_code == 0
    assert "experts" in experts.stderr
    assert "int8" not in experts.stdout
