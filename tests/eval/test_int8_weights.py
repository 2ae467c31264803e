"""``measure_int8_weights``: figures of both models, side by side."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from chunkcache.errors import UnsupportedModelError
from chunkcache.settings import load_settings
from chunkcache_eval.int8_weights import measure_int8_weights


def test_figures_of_a_tiny_model(model_dir: Callable[..., Path], cache_dir: Path) -> None:
    settings = load_settings(model=str(model_dir()), cache_dir=cache_dir)
    found = measure_int8_weights(settings, num_text_tokens=64, num_steps=3, repeats=1)
    assert found.compared_tokens == 48
    assert 0 < found.mean_kl < 0.02
    assert 0.8 <= found.top1_agreement <= 1
    assert found.weights_bytes_int8 < 0.6 * found.weights_bytes
    assert found.decode_speedup > 0
    assert json.loads(json.dumps(found.to_dict()))["decode_speedup"] == found.decode_speedup


def test_a_model_that_takes_no_int8_says_why(
    model_dir: Callable[..., Path], cache_dir: Path
) -> None:
    settings = load_settings(model=str(model_dir("mixtral")), cache_dir=cache_dir)
    with pytest.raises(UnsupportedModelError, match="experts"):
        measure_int8_weights(settings)
