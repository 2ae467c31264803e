"""What a GGUF file is, read from its header: whether the library's conversion would be right.

The library drops without a word what it has no place for, and takes its own defaults instead. Here
each architecture says which of the file's fields must equal such a default, and which are written
into the configuration afterwards; what is left is refused by name before a weight is read.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chunkcache.errors import ModelFilesError, UnsupportedModelError


@dataclass(frozen=True)
class _Architecture:
    """One architecture that can be converted.

    Attributes:
        assumed: Fields with the value that the library takes every file to have.
        restored: Fields that the library drops, with the name they have in a configuration.
        absent: Fields whose presence makes the model another one.
    """

    assumed: dict[str, Any] = field(default_factory=dict)
    restored: dict[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()


_GEMMA_HEAD_DIM = 256
"""Scores are taken to be scaled for heads of this size: a file does not say the scale."""
_ARCHITECTURES = {
    "llama": _Architecture(absent=("expert_count",)),
    "qwen2": _Architecture(),
    "qwen3": _Architecture(),
    "qwen3moe": _Architecture(assumed={"expert_feed_forward_length": 768}),
    "phi3": _Architecture(restored={"attention.sliding_window": "sliding_window"}),
    "gemma2": _Architecture(
        assumed={"attention.key_length": _GEMMA_HEAD_DIM},
        restored={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
    "gemma3": _Architecture(
        assumed={
            "attention.key_length": _GEMMA_HEAD_DIM,
            "attention.sliding_window_pattern": 6,
        },
    ),
}
"""By GGUF name."""

_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_MARKS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(digits: str) -> dict[str, Any]:
    """Words with the mark in front of them, runs of digits, marks, white space; then bytes."""
    pattern = f"{_CONTRACTIONS}|{_WORDS_AND_MARKS}|{digits}|{_REST}"
    return {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            },
            _BYTE_LEVEL | {"use_regex": False},
        ],
    }


_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "default": {},
    "gpt-2": {},
    "llama-bpe": {"pre_tokenizer": _split(r"\p{N}{1,3}"), "ignore_merges": True},
    "qwen2": {"pre_tokenizer": _split(r"\p{N}"), "normalizer": {"type": "NFC"}},
    "smollm": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
        }
    },
}
"""By GGUF name, what is set in the converted ``tokenizer.json``: the file names the rule alone."""


@dataclass(frozen=True)
class GgufFacts:
    """A file that can be converted.

    Attributes:
        num_elements: Numbers in all its tensors.
        pre_tokenizer: What to set in the converted ``tokenizer.json``.
        config: What to set in the converted ``config.json``.
    """

    num_elements: int
    pre_tokenizer: dict[str, Any]
    config: dict[str, Any]

    def correct_tokenizer(self, definition: dict[str, Any]) -> None:
        """Set what the library does not know in a ``tokenizer.json``."""
        for name, value in self.pre_tokenizer.items():
            part = definition["model"] if name == "ignore_merges" else definition
            part[name] = value


def inspect_gguf(path: Path) -> GgufFacts:
    """Read a file's header.

    Raises:
        ModelFilesError: It is no GGUF file, or only the beginning of one.
        UnsupportedModelError: Its conversion would be wrong, or would fail late; says why.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError) as error:
        raise ModelFilesError(f"{path.name} is not a readable GGUF file: {error}") from error
    fields = {name: value.contents() for name, value in reader.fields.items()}
    pre_tokenizer = fields.get("tokenizer.ggml.pre", "default")
    if pre_tokenizer not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{path.name} uses the pre-tokenizer {pre_tokenizer!r}; supported: "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    config = _config(fields, path.name)
    _check_rotation(fields, [t.name for t in reader.tensors], path.name)
    kinds = {t.tensor_type for t in reader.tensors}
    unknown = sorted(k.name for k in kinds if not _can_dequantise(k))
    if unknown:
        raise UnsupportedModelError(f"{path.name} has tensors of type {', '.join(unknown)}")
    num_elements = sum(int(t.n_elements) for t in reader.tensors)
    return GgufFacts(num_elements, _PRE_TOKENIZERS[pre_tokenizer], config)


def _config(fields: dict[str, Any], file_name: str) -> dict[str, Any]:
    name = fields.get("general.architecture")
    architecture = _ARCHITECTURES.get(str(name))
    if architecture is None:
        raise UnsupportedModelError(
            f"{file_name} has the architecture {name!r}; converted are "
            f"{', '.join(sorted(_ARCHITECTURES))}: use the original safetensors model"
        )
    for wanted, assumed in architecture.assumed.items():
        value = fields.get(f"{name}.{wanted}", assumed)
        if value != assumed:
            raise UnsupportedModelError(
                f"{file_name} has {wanted} {value}, where the conversion assumes {assumed}: use "
                "the original safetensors model"
            )
    for unwanted in architecture.absent:
        if fields.get(f"{name}.{unwanted}"):
            raise UnsupportedModelError(
                f"{file_name} has {unwanted} {fields[f'{name}.{unwanted}']}, which the conversion "
                "would drop: use the original safetensors model"
            )
    restored = architecture.restored.items()
    return {to: fields[f"{name}.{f}"] for f, to in restored if f"{name}.{f}" in fields}


def _check_rotation(fields: dict[str, Any], tensors: list[str], file_name: str) -> None:
    """Refuse rotations that the conversion would lose: scaled ones, and parts of heads."""
    scaling = sorted(f for f in fields if ".rope.scaling." in f)
    scaling += [t for t in tensors if t.startswith(("rope_freqs", "rope_factors"))]
    if scaling:
        raise UnsupportedModelError(
            f"{file_name} scales its rotation ({', '.join(scaling)}); the conversion would lose "
            "that: use the original safetensors model"
        )
    name = fields["general.architecture"]
    num_heads, width = (
        fields.get(f"{name}.{f}") for f in ("attention.head_count", "embedding_length")
    )
    head_dim = fields.get(f"{name}.attention.key_length")
    if head_dim is None and num_heads and width:
        head_dim = width // num_heads
    rotated = fields.get(f"{name}.rope.dimension_count", head_dim)
    if name == "phi3" and rotated != head_dim:
        raise UnsupportedModelError(
            f"{file_name} rotates {rotated} of each head's {head_dim} numbers; the conversion would "
            "lose that: use the original safetensors model"
        )


def _can_dequantise(kind: Any) -> bool:
    """Whether the library turns tensors of this type into floats; tried on one block of zeros."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    if kind.name in ("F32", "F16"):
        return True
    block = np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    try:
        dequantize(block, kind)
    except NotImplementedError:
        return False
    return True
