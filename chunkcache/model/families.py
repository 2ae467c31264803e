"""Facts about model families, and the facts of one loaded model.

A family is data: where its modules are and which of a handful of variations it uses. What no
family in the table has (a hook, another attention form) is refused with the property that makes
it impossible.
"""

from dataclasses import dataclass
from typing import Any

from chunkcache.errors import UnsupportedModelError


@dataclass(frozen=True)
class FamilyFacts:
    """How a family's decoder layer is put together.

    Attributes:
        name: Family name for messages.
        qk_norm: Whether queries and keys are normalised per head before RoPE.
        windowed: Whether layers may have a sliding window (read from the configuration).
    """

    name: str
    qk_norm: bool = False
    windowed: bool = False


FAMILIES: dict[str, FamilyFacts] = {
    "llama": FamilyFacts("Llama"),
    "mistral": FamilyFacts("Mistral", windowed=True),
    "qwen2": FamilyFacts("Qwen2", windowed=True),
    "qwen3": FamilyFacts("Qwen3", qk_norm=True, windowed=True),
}

_IMPOSSIBLE_PROPERTIES: tuple[tuple[str, str], ...] = (
    ("kv_lora_rank", "latent attention (MLA) keeps no per-head keys"),
    ("alibi", "ALiBi biases depend on distance, not on rotated keys"),
    ("ssm_cfg", "recurrent layers keep a state, not keys"),
    ("mamba_d_state", "recurrent layers keep a state, not keys"),
    ("linear_num_key_heads", "linear-attention layers keep a state, not keys"),
)
_SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
_LENGTH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")


@dataclass(frozen=True)
class ModelSpec:
    """The geometry and facts of one model that the rest of the core works with.

    Attributes:
        family: Facts of the family.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_dim: Elements per head.
        hidden_size: Width of the residual stream.
        vocab_size: Rows of the embedding.
        max_positions: Positions the model admits.
        windows: Per layer, the sliding window in tokens, or None.
        scale: Factor on attention scores.
        rope_is_length_dependent: Whether the rotation depends on the assembled length.
    """

    family: FamilyFacts
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    windows: tuple[int | None, ...]
    scale: float
    rope_is_length_dependent: bool

    def __post_init__(self) -> None:
        """Heads group evenly; every layer has a window entry."""
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.num_heads} query heads do not group over {self.num_kv_heads} KV heads"
            )
        assert len(self.windows) == self.num_layers


def spec_from_config(config: Any) -> ModelSpec:
    """Read a Hugging Face configuration.

    Args:
        config: A ``PreTrainedConfig``.

    Raises:
        UnsupportedModelError: Unknown family, or a property that rules reuse out; says which.
    """
    for attribute, reason in _IMPOSSIBLE_PROPERTIES:
        if getattr(config, attribute, None):
            raise UnsupportedModelError(
                f"model type {config.model_type!r} has {attribute!r}: {reason}"
            )
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        method = (
            quantization.get("quant_method")
            if isinstance(quantization, dict)
            else getattr(quantization, "quant_method", None)
        )
        raise UnsupportedModelError(
            f"the checkpoint is quantised ({getattr(method, 'value', method)}); use the original "
            "weights or a GGUF file"
        )
    facts = FAMILIES.get(config.model_type)
    if facts is None:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} is not in the table of families "
            f"({', '.join(sorted(FAMILIES))})"
        )
    rope = dict(getattr(config, "rope_parameters", None) or {})
    rope_type = rope.get("rope_type", "default")
    if rope_type not in _SUPPORTED_ROPE_TYPES:
        raise UnsupportedModelError(f"rope type {rope_type!r} is not supported")
    if "mrope_section" in rope:
        raise UnsupportedModelError("multi-axis positions (M-RoPE) are not supported")
    if float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError(
            f"partial rotary is not supported for model type {config.model_type!r}"
        )
    num_layers = config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return ModelSpec(
        family=facts,
        num_layers=num_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        windows=_windows(config, facts, num_layers),
        scale=head_dim**-0.5,
        rope_is_length_dependent=rope_type in _LENGTH_DEPENDENT_ROPE_TYPES,
    )


def _windows(config: Any, facts: FamilyFacts, num_layers: int) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None) if facts.windowed else None
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return (None,) * num_layers
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return (window,) * num_layers
    known = {"full_attention": None, "sliding_attention": window}
    unknown = sorted(set(layer_types) - set(known))
    if unknown:
        raise UnsupportedModelError(f"layers of type {', '.join(unknown)} are not supported")
    return tuple(known[t] for t in layer_types)
