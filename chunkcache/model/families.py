"""The table of families: how each one's decoder layer differs from the plain one.

A family is data: the names of its norms and which of a handful of variations it uses. It knows no
loaded model; ``spec.py`` reads a configuration by it, ``runner.py`` runs a layer by it. The facts
are those of the families' modules in ``transformers``.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayerNorms:
    """Attributes of a layer that hold its norms; None where the family has none in that place.

    Attributes:
        attention_in: Of what the projections read.
        attention_out: Of what attention adds to the residual stream.
        mlp_in: Of what the MLP reads.
        mlp_out: Of what the MLP adds.
    """

    attention_in: str | None = "input_layernorm"
    attention_out: str | None = None
    mlp_in: str | None = "post_attention_layernorm"
    mlp_out: str | None = None

    def names(self) -> tuple[str, ...]:
        """Those that there are."""
        places = (self.attention_in, self.attention_out, self.mlp_in, self.mlp_out)
        return tuple(name for name in places if name is not None)


_BEFORE = LayerNorms()
_BEHIND = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_AROUND = LayerNorms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


@dataclass(frozen=True)
class FamilyFacts:
    """How a family's decoder layer is put together.

    Attributes:
        name: Family name for messages.
        norms: Where a layer has norms.
        qk_norm: Whether queries and keys are normalised before RoPE: each ``head``, or the whole
            ``projection`` before it is cut into heads.
        fused_projections: Whether one matrix, ``qkv_proj``, gives queries, keys and values.
        experts: Whether the MLP may be a block of experts. Such a block takes ``[batch, tokens,
            hidden]``, and groups the rows by expert.
        windows: Which layers have the configuration's sliding window: none, all of them, or those
            that ``layer_types`` says.
        scale: What scales attention scores: ``head_dim ** -0.5``, the configuration's
            ``attention_multiplier``, or its ``query_pre_attn_scalar ** -0.5``.
        attention_softcap: Whether ``attn_logit_softcapping`` counts.
        logits_softcap: Whether ``final_logit_softcapping`` counts.
        multipliers: Whether the configuration scales embedding, residual branches and logits.
        partial_rotary: Whether a part of each head may stay unrotated.
        rope_by_layer_type: Whether each of the ``layer_types`` has a rotation of its own.
        layers_without_rope: Whether ``no_rope_layers`` names layers that do not rotate.
        reruns_past_switch: Whether an answer that grows past the length at which the rotation
            changes (longrope) has everything run again; the other families' libraries go on with
            the keys that are there.
    """

    name: str
    norms: LayerNorms = _BEFORE
    qk_norm: Literal["none", "head", "projection"] = "none"
    fused_projections: bool = False
    experts: bool = False
    windows: Literal["none", "every_layer", "by_layer_type"] = "none"
    scale: Literal["head_dim", "attention_multiplier", "query_pre_attn_scalar"] = "head_dim"
    attention_softcap: bool = False
    logits_softcap: bool = False
    multipliers: bool = False
    partial_rotary: bool = False
    rope_by_layer_type: bool = False
    layers_without_rope: bool = False
    reruns_past_switch: bool = False


FAMILIES: dict[str, FamilyFacts] = {
    "llama": FamilyFacts("Llama"),
    "mistral": FamilyFacts("Mistral", windows="every_layer"),
    "mixtral": FamilyFacts("Mixtral", windows="every_layer", experts=True),
    "qwen2": FamilyFacts("Qwen2", windows="by_layer_type"),
    "qwen3": FamilyFacts("Qwen3", windows="by_layer_type", qk_norm="head"),
    "qwen3_moe": FamilyFacts("Qwen3-MoE", windows="every_layer", qk_norm="head", experts=True),
    "smollm3": FamilyFacts("SmolLM3", windows="by_layer_type", layers_without_rope=True),
    "olmo2": FamilyFacts("OLMo2", norms=_BEHIND, qk_norm="projection"),
    "granite": FamilyFacts("Granite", scale="attention_multiplier", multipliers=True),
    "phi3": FamilyFacts(
        "Phi-3",
        windows="every_layer",
        fused_projections=True,
        partial_rotary=True,
        reruns_past_switch=True,
    ),
    "gemma2": FamilyFacts(
        "Gemma 2",
        norms=_AROUND,
        windows="by_layer_type",
        scale="query_pre_attn_scalar",
        attention_softcap=True,
        logits_softcap=True,
    ),
    "gemma3_text": FamilyFacts(
        "Gemma 3",
        norms=_AROUND,
        qk_norm="head",
        windows="by_layer_type",
        scale="query_pre_attn_scalar",
        logits_softcap=True,
        rope_by_layer_type=True,
    ),
}
"""By ``model_type``."""
