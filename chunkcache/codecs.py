"""Codecs: the form in which an entry's keys and values are kept.

A codec is part of what an answer depends on, so its name is in the entry's key, and a freshly
computed entry is used in its encoded form too: hot and cold answers see the same numbers.
"""

from dataclasses import dataclass

import torch

from chunkcache.errors import InvalidValueError


@dataclass(frozen=True)
class Codec:
    """A lossless-to-store form of keys and values: a cast to one dtype.

    Attributes:
        name: Stable name, in keys and headers.
        dtype: Dtype of the stored elements.
    """

    name: str
    dtype: torch.dtype

    def bytes_per_token(self, num_layers: int, num_kv_heads: int, head_dim: int) -> int:
        """Payload bytes of one token: K and V of every layer."""
        return 2 * num_layers * num_kv_heads * head_dim * self.dtype.itemsize


CODECS = {
    "raw32": Codec("raw32", torch.float32),
    "bf16": Codec("bf16", torch.bfloat16),
    "raw16": Codec("raw16", torch.float16),
}
"""``raw32``/``raw16``/``bf16`` hold fp32/fp16/bf16 compute without loss; ``bf16`` also halves fp32."""


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
