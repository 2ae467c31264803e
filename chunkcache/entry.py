"""An entry: one chunk's keys and values of every layer, computed once in isolation.

Entries are immutable. Keys are kept **before** rotary embedding (after the key norm, if the model
has one), so that an entry can be placed at any position.
"""

from dataclasses import dataclass

import numpy as np
import torch

from chunkcache.errors import InvalidValueError
from chunkcache.identity import ChunkKey, EntryIdentity
from chunkcache_kernels.checks import KernelArgumentError
from chunkcache_kernels.quantised import Scales, require_scales

_NOT_FINITE_BITS = {
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float8_e4m3fn: (torch.int8, 0x7F),
}
"""An integer type of that size, and the bits that NaN and infinities alone have all set. int8 has
no such numbers."""


@dataclass(frozen=True)
class EntryShape:
    """Geometry of an entry's tensors."""

    num_layers: int
    num_tokens: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        """Every axis holds something."""
        if min(self.num_layers, self.num_tokens, self.num_kv_heads, self.head_dim) < 1:
            raise InvalidValueError(f"an entry cannot have the shape {self}")

    @property
    def axes(self) -> tuple[int, int, int, int]:
        """``(L, T, Hkv, D)``."""
        return self.num_layers, self.num_tokens, self.num_kv_heads, self.head_dim

    @property
    def layer_elements(self) -> int:
        """Elements of K (or of V) of one layer."""
        return self.num_tokens * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Entry:
    """One chunk's keys and values, encoded.

    Attributes:
        identity: The fields behind ``key``.
        key: 32-byte key (derived from ``identity``; kept so that it is computed once).
        k: ``[num_layers, num_tokens, num_kv_heads, head_dim]`` before RoPE, codec dtype, host.
        v: Same shape and dtype.
        scales: What quantised keys and values are multiplied by; None where they are not quantised.
    """

    identity: EntryIdentity
    key: ChunkKey
    k: torch.Tensor
    v: torch.Tensor
    scales: Scales | None = None

    def __post_init__(self) -> None:
        """Shapes agree with each other, with the scales and with the token ids."""
        if self.k.shape != self.v.shape or self.k.ndim != 4 or self.k.dtype != self.v.dtype:
            raise InvalidValueError(
                f"keys {tuple(self.k.shape)} {self.k.dtype} and values {tuple(self.v.shape)} "
                f"{self.v.dtype} do not form an entry"
            )
        if self.k.shape[1] != len(self.identity.token_ids):
            raise InvalidValueError(
                f"an entry of {len(self.identity.token_ids)} tokens has {self.k.shape[1]} rows"
            )
        try:
            require_scales(self.k, self.v, self.scales)
        except KernelArgumentError as error:
            raise InvalidValueError(f"not an entry: {error}") from error
        assert not self.k.requires_grad
        assert not self.v.requires_grad

    @property
    def shape(self) -> EntryShape:
        """Geometry of ``k`` and ``v``."""
        return EntryShape(*self.k.shape)

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return self.k.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of ``k``, ``v`` and their scales."""
        scale_bytes = 0 if self.scales is None else self.scales.num_bytes
        return self.k.nbytes + self.v.nbytes + scale_bytes

    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite; a quantised one is if its scale is.

        Layer by layer, with a library that uses no threads: callers are not the engine's thread
        (see ``short_thread``).
        """
        tensors = [self.k, self.v]
        if self.scales is not None:
            tensors += [self.scales.k, self.scales.v]
        return all(
            int(np.bitwise_and(layer, mask).max()) != mask
            for tensor in tensors
            if tensor.dtype in _NOT_FINITE_BITS
            for bits, mask in [_NOT_FINITE_BITS[tensor.dtype]]
            for layer in tensor.view(bits).numpy()
        )
