"""What cannot be reused is refused before any weight is read, by the property that says why."""

from typing import Any

import pytest
from transformers import AutoConfig

from chunkcache.errors import UnsupportedModelError
from chunkcache.model.families import FAMILIES
from chunkcache.model.spec import spec_from_config
from chunkcache.testing import TINY_FAMILIES

ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v3", "MLA"),
        ("minicpm3", "MLA"),
        ("mamba", "keep a state"),
        ("jamba", "keep a state"),
        ("recurrent_gemma", "keep a state"),
        ("qwen3_next", "keep a state"),
        ("gpt2", "no rotary positions"),
        ("opt", "no rotary positions"),
        ("bloom", "no rotary positions"),
        ("gptj", "'gptj' is not in the table"),
        ("cohere2", "'cohere2' is not in the table"),
        ("olmo3", "'olmo3' is not in the table"),
    ],
)
def test_other_models(model_type: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        spec_from_config(AutoConfig.for_model(model_type))
    assert model_type in caught.value.message


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("llama", {"alibi": True}, "ALiBi"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "tokens behind"),
        ("qwen2", {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}}, "M-RoPE"),
        ("llama", {"rope_parameters": ROPE | {"rope_type": "proportional"}}, "proportional"),
        ("qwen3", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}, "partial rotary"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ("gemma2", {"num_attention_heads": 6, "num_key_value_heads": 4}, "do not group"),
        ("phi3", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_a_known_family_with_an_impossible_property(
    family: str, fields: dict[str, Any], reason: str
) -> None:
    config = AutoConfig.for_model(family, num_hidden_layers=2)
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModelError, match=reason):
        spec_from_config(config)


def test_every_family_has_a_tiny_model() -> None:
    assert set(TINY_FAMILIES) == set(FAMILIES)


def test_mistral_s_window_is_every_layer_s_whatever_else_it_says() -> None:
    """The library's Mistral does not look at ``layer_types``."""
    config = AutoConfig.for_model("mistral", num_hidden_layers=2, sliding_window=20)
    config.layer_types = ["full_attention", "sliding_attention"]
    assert spec_from_config(config).windows == (20, 20)
