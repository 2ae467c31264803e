"""The matrix of families and rotations: which cells there are, and each one's tiny model.

The tests and ``chunkcache eval models`` stand on this one definition.
"""

from pathlib import Path
from typing import Any

import torch

from chunkcache.model.loading import LoadedModel, load_model
from chunkcache.testing import TINY_FAMILIES, write_tiny_model

MAX_POSITIONS = 256
PROMPT_TOKENS = 100
"""Longer than every window of a tiny model, and every original length below."""
OFFSETS = (0, 1, 77)
"""Where a chunk's keys are compared, beside the last place that the model admits."""

_THETA = {"rope_theta": 10000.0}


def _longrope(num_angles: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "factor": MAX_POSITIONS / 64,
        "short_factor": [1.0 + 0.1 * i for i in range(num_angles)],
        "long_factor": [2.0 + 0.7 * i for i in range(num_angles)],
        "original_max_position_embeddings": 64,
        **_THETA,
    }


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", **_THETA},
    "linear": {"rope_type": "linear", "factor": 2.0, **_THETA},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        **_THETA,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        **_THETA,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, **_THETA},
    "longrope": _longrope(8),
}
"""Rotations by name, for heads of 16."""

CELLS: tuple[tuple[str, str], ...] = tuple(
    (family, rope)
    for family in TINY_FAMILIES
    for rope in ROPES
    # The library's Phi-3 takes no other rotation.
    if family != "phi3" or rope in ("default", "longrope")
)
"""Family and rotation of each cell."""


def cell_config(family: str, rope: str) -> dict[str, Any]:
    """The configuration of one cell; dynamic scaling starts at the model's own length."""
    parameters: dict[str, Any] = ROPES[rope]
    config: dict[str, Any] = {"max_position_embeddings": 64 if rope == "dynamic" else MAX_POSITIONS}
    if family == "gemma3_text":
        parameters = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": parameters,
        }
    if family == "phi3":
        parameters = _longrope(4) if rope == "longrope" else parameters
        parameters = parameters | {"partial_rotary_factor": 0.5}
        config["original_max_position_embeddings"] = 64
    return config | {"rope_parameters": parameters}


def randomise_vectors(hf_model: Any) -> None:
    """Give norm weights and biases random values: a norm in the wrong place must tell."""
    generator = torch.Generator().manual_seed(7)
    for parameter in hf_model.parameters():
        if parameter.dim() == 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += (0.3 * noise).to(parameter.dtype)


def load_cell(family: str, rope: str, folder: Path, dtype: str = "float32") -> LoadedModel:
    """The tiny model of one cell.

    Args:
        family: One of ``TINY_FAMILIES``.
        rope: One of ``ROPES``.
        folder: Where its files are written.
        dtype: Compute dtype.
    """
    path = write_tiny_model(
        folder / f"{family}-{rope}", family=family, seed=5, **cell_config(family, rope)
    )
    loaded = load_model(str(path), cache_dir=folder, dtype=dtype)
    randomise_vectors(loaded.runner.hf_model)
    return loaded
