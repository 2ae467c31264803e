"""Codecs: the form in which an entry's keys and values are kept.

A codec is part of what an answer depends on, so its name is in the entry's key, and a freshly
computed entry is used in its encoded form too: hot and cold answers see the same numbers.
"""

from dataclasses import dataclass

import torch

from chunkcache.entry import EntryShape
from chunkcache.errors import InvalidValueError
from chunkcache_kernels.quantise.op import quantise
from chunkcache_kernels.quantised import GROUP_TOKENS, Scales, count_groups


@dataclass(frozen=True)
class Codec:
    """One form: a cast to a float type, or small numbers with scales.

    Attributes:
        name: Stable name, in keys and headers.
        dtype: Type of the stored elements.
        group_tokens: Tokens whose keys share scales, for a form with scales; else None.
    """

    name: str
    dtype: torch.dtype
    group_tokens: int | None = None

    def bytes_per_token(self, num_layers: int, num_kv_heads: int, head_dim: int) -> int:
        """Payload bytes of one token of a long chunk: K and V of every layer, and their scales."""
        num_bytes = 2 * num_kv_heads * head_dim * self.dtype.itemsize
        if self.group_tokens is not None:
            scale_bytes = torch.float32.itemsize * num_kv_heads
            num_bytes += scale_bytes - (-scale_bytes * head_dim // self.group_tokens)
        return num_layers * num_bytes


class LayerEncoder:
    """Host memory for one entry, filled layer by layer.

    Args:
        codec: The form.
        shape: Geometry of the entry.

    Attributes:
        k: ``[L, T, Hkv, D]`` of the codec's type.
        v: Like ``k``.
        scales: Of a codec that has some, else None.
    """

    def __init__(self, codec: Codec, shape: EntryShape) -> None:
        num_layers, num_tokens, num_kv_heads, head_dim = shape.axes
        self.k = torch.empty(shape.axes, dtype=codec.dtype)
        self.v = torch.empty(shape.axes, dtype=codec.dtype)
        self.scales: Scales | None = None
        if codec.group_tokens is not None:
            num_groups = count_groups(num_tokens, codec.group_tokens)
            self.scales = Scales(
                torch.empty(num_layers, num_groups, num_kv_heads, head_dim),
                torch.empty(num_layers, num_tokens, num_kv_heads),
                codec.group_tokens,
            )

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Encode keys before RoPE and values ``[T, Hkv, D]`` of one layer, from any device."""
        if self.scales is None:
            self.k[layer].copy_(k)
            self.v[layer].copy_(v)
            return
        small_k, small_v, scales = quantise(
            k[None], v[None], self.k.dtype, group_tokens=self.scales.group_tokens
        )
        self.k[layer].copy_(small_k[0])
        self.v[layer].copy_(small_v[0])
        self.scales.k[layer].copy_(scales.k[0])
        self.scales.v[layer].copy_(scales.v[0])


CODECS = {
    "raw32": Codec("raw32", torch.float32),
    "bf16": Codec("bf16", torch.bfloat16),
    "raw16": Codec("raw16", torch.float16),
    "int8": Codec("int8", torch.int8, GROUP_TOKENS),
    "fp8": Codec("fp8", torch.float8_e4m3fn, GROUP_TOKENS),
}
"""``raw32``/``raw16``/``bf16`` hold fp32/fp16/bf16 compute without loss; ``bf16`` also halves fp32.
``int8`` and ``fp8`` take about half of ``bf16``: keys with a scale per channel and token group,
values with one per head and token."""


def codec_by_name(name: str, compute_dtype: torch.dtype) -> Codec:
    """Look a codec up.

    Args:
        name: A codec's name, or ``raw``: the codec that keeps ``compute_dtype`` exactly.
        compute_dtype: Dtype the model computes keys and values in.

    Raises:
        InvalidValueError: No such codec, or one that overflows on this compute dtype.
    """
    if name == "raw":
        raw = {c.dtype: c for c in CODECS.values()}
        if compute_dtype not in raw:
            raise InvalidValueError(f"no raw codec for {compute_dtype}", param="codec")
        return raw[compute_dtype]
    if name not in CODECS:
        known = ", ".join(["raw", *sorted(CODECS)])
        raise InvalidValueError(f"unknown codec {name!r}; known: {known}", param="codec")
    codec = CODECS[name]
    if codec.dtype is torch.float16 and compute_dtype is not torch.float16:
        raise InvalidValueError(
            f"codec {name!r} would overflow values computed in {compute_dtype}", param="codec"
        )
    return codec
