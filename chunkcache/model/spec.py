"""The geometry and facts of one model, read from its Hugging Face configuration; or a refusal.

What no family in the table has is refused with the property that makes reuse impossible, before
any weight is read.
"""

from dataclasses import dataclass
from typing import Any

from chunkcache.errors import UnsupportedModelError
from chunkcache.model.families import FAMILIES, FamilyFacts

_NO_STATE = "recurrent layers keep a state that cannot be moved, not keys"
_IMPOSSIBLE_PROPERTIES: tuple[tuple[str, str], ...] = (
    ("kv_lora_rank", "latent attention (MLA) keeps no per-head keys"),
    ("alibi", "ALiBi biases depend on distance, not on rotated keys"),
    ("use_bidirectional_attention", "rows see tokens behind them, so a chunk alone says nothing"),
    ("ssm_cfg", _NO_STATE),
    ("state_size", _NO_STATE),
    ("mamba_d_state", _NO_STATE),
    ("lru_width", _NO_STATE),
    ("linear_num_key_heads", _NO_STATE),
)
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
_LENGTH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")


@dataclass(frozen=True)
class RopeSpec:
    """How a model's layers rotate.

    Attributes:
        layer_types: Per rotation of the model, the layer type that its rotary module asks for;
            None where the module has one rotation and takes no type.
        table_of_layer: Per layer, which of them it uses; -1 for a layer without RoPE.
        is_length_dependent: Whether a rotation depends on the assembled length.
        switch_tokens: The longest prompt that still has the short factors (longrope), or None.
    """

    layer_types: tuple[str | None, ...]
    table_of_layer: tuple[int, ...]
    is_length_dependent: bool
    switch_tokens: int | None

    def __post_init__(self) -> None:
        """Every layer's rotation is there."""
        assert all(-1 <= t < len(self.layer_types) for t in self.table_of_layer)


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
        rope: How the layers rotate.
        scale: Factor on attention scores.
        attention_softcap: Soft-cap of attention scores, or None.
        logits_softcap: Soft-cap of the logits, or None.
        embedding_multiplier: Factor on embeddings that the embedding module does not apply itself.
        residual_multiplier: Factor on what attention and MLP add to the residual stream.
        logits_divisor: What the head's output is divided by.
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
    rope: RopeSpec
    scale: float
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0

    def __post_init__(self) -> None:
        """Heads group evenly; every layer has a window and a rotation entry."""
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.num_heads} query heads do not group over {self.num_kv_heads} KV heads"
            )
        assert len(self.windows) == len(self.rope.table_of_layer) == self.num_layers


def spec_from_config(config: Any) -> ModelSpec:
    """Read a Hugging Face configuration.

    Args:
        config: A ``PreTrainedConfig``.

    Raises:
        UnsupportedModelError: Unknown family, or a property that rules reuse out; says which.
    """
    facts = _family(config)
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    multipliers = facts.multipliers
    return ModelSpec(
        family=facts,
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        windows=_windows(config, facts),
        rope=_rope(config, facts),
        scale=_scale(config, facts, head_dim),
        attention_softcap=config.attn_logit_softcapping if facts.attention_softcap else None,
        logits_softcap=config.final_logit_softcapping if facts.logits_softcap else None,
        embedding_multiplier=config.embedding_multiplier if multipliers else 1.0,
        residual_multiplier=config.residual_multiplier if multipliers else 1.0,
        logits_divisor=config.logits_scaling if multipliers else 1.0,
    )


def _family(config: Any) -> FamilyFacts:
    model_type = config.model_type
    for attribute, reason in _IMPOSSIBLE_PROPERTIES:
        if getattr(config, attribute, None):
            raise UnsupportedModelError(f"model type {model_type!r} has {attribute!r}: {reason}")
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
    rope = getattr(config, "rope_parameters", None)
    if "mrope_section" in (rope or {}):
        raise UnsupportedModelError(
            f"model type {model_type!r} has multi-axis positions (M-RoPE): a token has no one position"
        )
    facts = FAMILIES.get(model_type) or _family_that_code_derives_from(config)
    if facts is None:
        known = f"the table of families ({', '.join(sorted(FAMILIES))})"
        if rope:
            raise UnsupportedModelError(f"model type {model_type!r} is not in {known}")
        raise UnsupportedModelError(
            f"model type {model_type!r} is not in {known}, and has no rotary positions: keys that "
            "hold their position otherwise cannot be moved"
        )
    return facts


def _family_that_code_derives_from(config: Any) -> FamilyFacts | None:
    """The supported family behind a configuration class that came with the model's own code.

    Whether its forward is the family's is for the gate to say. The library's own classes derive
    from one another too, but are other families.
    """
    kind = type(config)
    if not kind.__module__.startswith("transformers_modules."):
        return None
    types = (vars(base).get("model_type") for base in kind.__mro__)
    return next((FAMILIES[t] for t in types if t in FAMILIES), None)


def _scale(config: Any, facts: FamilyFacts, head_dim: int) -> float:
    match facts.scale:
        case "head_dim":
            return head_dim**-0.5
        case "attention_multiplier":
            return float(config.attention_multiplier)
        case "query_pre_attn_scalar":
            return config.query_pre_attn_scalar**-0.5


def _windows(config: Any, facts: FamilyFacts) -> tuple[int | None, ...]:
    """Per layer its window. The configuration class has nulled a window that is not in use."""
    num_layers = config.num_hidden_layers
    window = config.sliding_window if facts.windows != "none" else None
    if facts.windows != "by_layer_type":
        return (window,) * num_layers
    known = {"full_attention": None, "sliding_attention": window}
    _refuse_unknown_layers(config, known)
    return tuple(known[t] for t in config.layer_types)


def _refuse_unknown_layers(config: Any, known: dict[str, Any]) -> None:
    unknown = sorted(set(config.layer_types) - set(known))
    if unknown:
        raise UnsupportedModelError(f"layers of type {', '.join(unknown)} are not supported")


def _rope(config: Any, facts: FamilyFacts) -> RopeSpec:
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    num_layers = config.num_hidden_layers
    if facts.rope_by_layer_type:
        types = tuple(sorted(set(config.layer_types)))
        tables = {t: i for i, t in enumerate(types)}
        parts = [dict(parameters[t]) for t in types]
        layer_types: tuple[str | None, ...] = types
        table_of_layer = tuple(tables[t] for t in config.layer_types)
    else:
        parts = [parameters]
        layer_types = (None,)
        rotates = config.no_rope_layers if facts.layers_without_rope else (True,) * num_layers
        table_of_layer = tuple(0 if r else -1 for r in rotates)
    for part in parts:
        _check_rope(part, config.model_type, facts)
    switches = [p["original_max_position_embeddings"] for p in parts if _rope_type(p) == "longrope"]
    return RopeSpec(
        layer_types=layer_types,
        table_of_layer=table_of_layer,
        is_length_dependent=any(_rope_type(p) in _LENGTH_DEPENDENT_ROPE_TYPES for p in parts),
        switch_tokens=min(switches, default=None),
    )


def _rope_type(parameters: dict[str, Any]) -> str:
    return parameters.get("rope_type", "default")


def _check_rope(parameters: dict[str, Any], model_type: str, facts: FamilyFacts) -> None:
    if _rope_type(parameters) not in _ROPE_TYPES:
        raise UnsupportedModelError(f"rope type {_rope_type(parameters)!r} is not supported")
    is_partial = float(parameters.get("partial_rotary_factor", 1.0)) != 1.0
    if is_partial and not facts.partial_rotary:
        raise UnsupportedModelError(
            f"partial rotary is not supported for model type {model_type!r}"
        )
