"""LoRA adapters as PEFT writes them: read, checked, and named by their content.

Owns what of ``adapter_config.json`` and ``adapter_model.safetensors`` is understood, and refuses the
rest by name: a part of an adapter that is left out gives other answers without a word. Knows no
model; ``adapter_merge`` puts an adapter into one.

The files are read here and not by ``peft``: that library warns about tensors it cannot place, goes
on, and fits its modules around a model's own, where merging is one product per matrix.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from chunkcache.errors import ModelFilesError, UnsupportedModelError
from chunkcache.identity import digest_fields
from chunkcache.model.json_files import read_json

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"
KEY_PREFIX: Final = "base_model.model."

_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "modules_to_save",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)
"""Fields that say how an adapter was trained, or what its tensors' own names say again."""
_READ = frozenset(
    {
        "alpha_pattern",
        "bias",
        "init_lora_weights",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "use_dora",
        "use_rslora",
    }
)
_KEEPS_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways of starting the training that leave the base's weights as they are."""
_REASONS: Mapping[str, str] = {
    "alora_invocation_tokens": "it acts from certain tokens on, so a chunk alone says nothing",
    "ensure_weight_tying": "a tied embedding and head would both have to change",
    "fan_in_fan_out": "its matrices are transposed",
    "layer_replication": "it repeats layers of the base",
    "lora_bias": "it has biases of its own",
    "target_parameters": "it changes parameters that are no matrices of their own, as blocks of "
    "experts have",
    "trainable_token_indices": "it replaces single rows of the embedding",
}

_GGUF_END = re.compile(r"([.-](i?q\d\w*|b?f\d+))?\.gguf$", re.IGNORECASE)


@dataclass(frozen=True)
class LoraConfig:
    """What a LoRA adapter's scale depends on (Hu et al. 2021, arXiv 2106.09685).

    Attributes:
        rank: Rank of the updates.
        alpha: Numerator of the scale.
        rank_pattern: Ranks of modules whose name ends in a pattern, where they differ.
        alpha_pattern: The same for alpha.
        is_rank_stabilised: Whether alpha is divided by the root of the rank (Kalajdzievski 2023,
            arXiv 2312.03732), not by the rank.
        is_dora: Whether rows are scaled to a learned length (Liu et al. 2024, arXiv 2402.09353).
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    is_rank_stabilised: bool
    is_dora: bool

    def rank_of(self, module: str) -> int:
        """Rank of a module's update."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Factor on a module's update."""
        rank = self.rank_of(module)
        divisor = math.sqrt(rank) if self.is_rank_stabilised else rank
        return _by_pattern(self.alpha_pattern, module, self.alpha) / divisor


@dataclass(frozen=True)
class Adapter:
    """An adapter, read and understood.

    Attributes:
        name: Display name; never part of a key.
        digest: Of the tensors' file and of every field that counts, 32 bytes.
        base_name: What the adapter calls its base, or None.
        config: How updates are scaled.
        tensors: By name, without PEFT's prefix.
    """

    name: str
    digest: bytes
    base_name: str | None
    config: LoraConfig
    tensors: Mapping[str, torch.Tensor]


def read_adapter(path: Path, name: str) -> Adapter:
    """Read a PEFT directory.

    Args:
        path: The directory.
        name: Display name.

    Raises:
        ModelFilesError: A file is missing or unreadable.
        UnsupportedModelError: It is no LoRA adapter, or one with a part that is not merged.
    """
    raw = read_json(path / CONFIG_NAME)
    config = _lora_config(raw, name)
    # The bytes that are named are the bytes that are used: both come from one read.
    data = _weights(path)
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise ModelFilesError(f"{path / WEIGHTS_NAME} cannot be read: {error}") from error
    foreign = sorted(n for n in tensors if not n.startswith(KEY_PREFIX))
    if foreign or not tensors:
        raise ModelFilesError(
            f"adapter {name!r} holds {foreign[0] if foreign else 'no tensor'}; PEFT's names "
            f"begin with {KEY_PREFIX}"
        )
    # In the file's order: of two patterns that fit a module the first one counts.
    facts = {k: v for k, v in raw.items() if k not in _WITHOUT_EFFECT}
    base = raw.get("base_model_name_or_path")
    return Adapter(
        name=name,
        digest=digest_fields("adapter", [("config", json.dumps(facts)), ("weights", data)]),
        base_name=base if isinstance(base, str) and base else None,
        config=config,
        tensors={n.removeprefix(KEY_PREFIX): t for n, t in tensors.items()},
    )


def check_base(adapter: Adapter, *names: str) -> None:
    """Refuse an adapter that names another base.

    Args:
        adapter: The adapter.
        names: What the model is known by; directories' and owners' names do not count.

    Raises:
        ModelFilesError: None of them is what the adapter calls its base.
    """
    if adapter.base_name is None:
        return
    wanted = _last_part(adapter.base_name)
    if wanted not in {_last_part(name) for name in names}:
        raise ModelFilesError(
            f"adapter {adapter.name!r} is for the base {adapter.base_name!r}, not for "
            f"{names[0]!r}; if these are the same weights, say so in its {CONFIG_NAME}: "
            f'"base_model_name_or_path": "{names[0]}"'
        )


def _weights(path: Path) -> bytes:
    try:
        return (path / WEIGHTS_NAME).read_bytes()
    except FileNotFoundError as error:
        found = sorted(p.name for p in path.glob("*.bin"))
        hint = ""
        if found:
            hint = (
                f" ({found[0]} is a pickle file, which is not loaded; load it with PEFT where you "
                "trust it, and save_pretrained(..., safe_serialization=True))"
            )
        raise ModelFilesError(f"adapter {path} has no {WEIGHTS_NAME}{hint}") from error
    except OSError as error:
        raise ModelFilesError(f"{path / WEIGHTS_NAME} cannot be read: {error}") from error


def _lora_config(raw: dict[str, Any], name: str) -> LoraConfig:
    if raw.get("peft_type") != "LORA":
        raise UnsupportedModelError(
            f"adapter {name!r} is of type {raw.get('peft_type')!r}; only LORA adapters are merged"
        )
    for key in sorted(raw.keys() - _READ - _WITHOUT_EFFECT):
        if raw[key]:
            reason = _REASONS.get(key, "not known here")
            raise UnsupportedModelError(f"adapter {name!r} sets {key}: {reason}")
    start = raw.get("init_lora_weights")
    if not any(start is kept or start == kept for kept in _KEEPS_THE_BASE):
        raise UnsupportedModelError(
            f"adapter {name!r} was started with {start!r}, which changes the base's weights too"
        )
    try:
        return LoraConfig(
            rank=_positive(raw["r"]),
            alpha=float(raw["lora_alpha"]),
            rank_pattern={str(k): _positive(v) for k, v in (raw.get("rank_pattern") or {}).items()},
            alpha_pattern={str(k): float(v) for k, v in (raw.get("alpha_pattern") or {}).items()},
            is_rank_stabilised=bool(raw.get("use_rslora")),
            is_dora=bool(raw.get("use_dora")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelFilesError(
            f"{CONFIG_NAME} of adapter {name!r} holds no usable r, lora_alpha or patterns"
        ) from error


def _positive(value: Any) -> int:
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise ValueError(value)
    return int(value)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that a module's name ends in, at a dot."""
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(?:.*\.)?(?:{pattern})$", module):
                return value
        except re.error as error:
            raise ModelFilesError(f"{pattern!r} in {CONFIG_NAME} is no pattern") from error
    return default


def _last_part(name: str) -> str:
    """The last part of a hub id or a path, without what a GGUF file's name says of its tensors."""
    return _GGUF_END.sub("", name.rstrip("/").rpartition("/")[2]).casefold()
