"""Owns the quantised form of keys and values: which types, how they are grouped, what a scale means.

Keys before RoPE have a few channels that are large at every token, so a key shares its scale with
its channel, over a group of consecutive tokens; values have no such channels, so a value shares its
scale with its head and token (the finding of KIVI, arXiv:2402.02750, there for 2 bits). Symmetric:
a stored element times its scale is the number. Knows no operator and no store.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from chunkcache_kernels.checks import require, require_dims, require_shape

LARGEST: dict[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The quantised types and the magnitude that a group's largest element becomes. int8 leaves -128
unused, so that the range is symmetric; e4m3 has no infinity and saturates here."""

GROUP_TOKENS = 64
"""Tokens whose keys share scales, where nobody says otherwise."""


@dataclass(frozen=True)
class Scales:
    """What quantised keys and values are multiplied by. Immutable, as its tensors are to be.

    Attributes:
        k: fp32 ``[L, G, Hkv, D]``; group ``g`` holds tokens ``g * group_tokens`` and following.
        v: fp32 ``[L, T, Hkv]``.
        group_tokens: Tokens of a group; the last one may hold fewer.
    """

    k: Tensor
    v: Tensor
    group_tokens: int

    def __post_init__(self) -> None:
        require(self.group_tokens > 0, f"group_tokens must be positive, got {self.group_tokens}")
        require_dims("scales.v", self.v, "L,T,Hkv")
        require_dims("scales.k", self.k, "L,G,Hkv,D")
        num_layers, num_tokens, num_heads = self.v.shape
        num_groups = count_groups(num_tokens, self.group_tokens)
        require_shape("scales.k", self.k, (num_layers, num_groups, num_heads, self.k.shape[3]))
        for name, tensor in (("scales.k", self.k), ("scales.v", self.v)):
            require(tensor.dtype == torch.float32, f"{name} must be float32, got {tensor.dtype}")

    @property
    def num_bytes(self) -> int:
        """Bytes of both tensors."""
        return self.k.nbytes + self.v.nbytes

    def to(self, device: torch.device) -> "Scales":
        """The same on a device; itself where it is there."""
        if self.k.device == device:
            return self
        return Scales(self.k.to(device), self.v.to(device), self.group_tokens)


def count_groups(num_tokens: int, group_tokens: int) -> int:
    """Groups that hold ``num_tokens`` tokens."""
    return -(-num_tokens // group_tokens)


def per_token(group_scales: Tensor, num_tokens: int, group_tokens: int) -> Tensor:
    """Repeat scales of groups ``[L, G, ...]`` for each of their tokens: ``[L, T, ...]``."""
    return group_scales.repeat_interleave(group_tokens, dim=1)[:, :num_tokens]


def dequantise(k: Tensor, v: Tensor, scales: Scales) -> tuple[Tensor, Tensor]:
    """Return fp32 keys and values ``[L, T, Hkv, D]``: element times scale, rounded once.

    Args:
        k: Quantised keys ``[L, T, Hkv, D]``.
        v: Quantised values, like ``k``.
        scales: Theirs.
    """
    return (
        k.float() * per_token(scales.k, k.shape[1], scales.group_tokens),
        v.float() * scales.v[..., None],
    )


def require_scales(k: Tensor, v: Tensor, scales: Scales | None) -> None:
    """Raise unless quantised types come with scales that fit, and other types without any.

    Raises:
        KernelArgumentError: They do not.
    """
    require(k.dtype == v.dtype, f"k is {k.dtype} but v is {v.dtype}")
    if scales is None:
        require(k.dtype not in LARGEST, f"keys of type {k.dtype} need scales")
        require(k.dtype.is_floating_point, f"k must be of a float type, got {k.dtype}")
        return
    require(k.dtype in LARGEST, f"scales are for quantised types, but k is {k.dtype}")
    require_shape("scales.v", scales.v, tuple(k.shape[:3]))
    require_shape("scales.k", scales.k, (k.shape[0], scales.k.shape[1], *k.shape[2:]))
