"""The gate: what it measures, where its prompt goes, what each kind of fault leads to."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from chunkcache.errors import GateFailedError
from chunkcache.fusion.place import place_entry
from chunkcache.model.gate import GateReport, check_gate, run_gate
from chunkcache.model.loading import load_model
from chunkcache.store.reports import decode_report
from chunkcache.testing import TINY_FAMILIES

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.7 * i for i in range(8)],
}


@pytest.mark.parametrize(
    ("family", "config", "num_tokens"),
    [
        ("llama", {}, 76),
        ("mistral", {"sliding_window": 100}, 139),
        ("mistral", {"sliding_window": 500}, 76),
        (
            "llama",
            {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 128}},
            167,
        ),
    ],
    ids=["no edge", "window", "window too wide for the model", "switch"],
)
def test_the_prompt_crosses_what_it_can(
    load_tiny: Callable[..., Any], family: str, config: dict[str, Any], num_tokens: int
) -> None:
    report = run_gate(load_tiny(family, **config).runner)
    assert report.num_tokens == num_tokens
    assert report.passed
    assert not report.full_only
    check_gate(report)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_half_precision_passes_in_every_family(model_dir: Any, cache_dir: Any, family: str) -> None:
    loaded = load_model(str(model_dir(family)), cache_dir=cache_dir, dtype="bfloat16")
    report = run_gate(loaded.runner)
    assert loaded.runner.dtype == torch.bfloat16
    assert report.passed, report.findings()


@pytest.mark.parametrize("window", [None, 24])
def test_a_window_that_is_forgotten_fails(load_tiny: Callable[..., Any], window: Any) -> None:
    runner = load_tiny("mistral", sliding_window=24).runner
    runner.spec = replace(runner.spec, windows=(window,) * runner.spec.num_layers)
    report = run_gate(runner)
    assert report.passed == (window == 24)
    if window is None:
        assert not report.full_only
        with pytest.raises(GateFailedError, match="logits differ"):
            check_gate(report)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text", "smollm3"])
def test_another_rotation_than_the_library_s_is_found_in_any_layer(
    load_tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The last layer's keys are rotated backwards, everywhere alike: only the library can tell."""

    def backwards(sequence: Any, entry: Any, start: int) -> None:
        place_entry(sequence, entry, start)
        sequence.k_pages[-1].neg_()

    runner = load_tiny(family).runner
    monkeypatch.setattr("chunkcache.model.gate.place_entry", backwards)
    report = run_gate(runner)
    assert report.layer0_difference <= report.tolerance
    assert report.rotation_difference > report.tolerance
    assert (report.passed, report.full_only) == (False, True)
    check_gate(report)


def test_what_is_no_number_fails(load_tiny: Callable[..., Any]) -> None:
    runner = load_tiny("llama", seed=9).runner
    runner.hf_model.model.layers[1].mlp.down_proj.weight.data[0, 0] = float("nan")
    report = run_gate(runner)
    assert not report.passed
    assert report.logits_difference > 1e300
    assert math.isfinite(report.logits_difference), "JSON has no word for infinity"


def test_a_report_comes_back_as_it_was_stored(load_tiny: Callable[..., Any]) -> None:
    report = run_gate(load_tiny("qwen3").runner)
    assert decode_report(msgspec.msgpack.encode(report), GateReport) == report
    assert decode_report(b"\x81\xa1x", GateReport) is None
    older = msgspec.to_builtins(report)
    del older["rotation_difference"]
    assert decode_report(msgspec.msgpack.encode(older), GateReport) is None
