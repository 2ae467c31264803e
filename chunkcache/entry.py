"""An entry: one chunk's keys and values of every layer, computed once in isolation.

Entries are immutable. Keys are kept **before** rotary embedding (after the key norm, if the model
has one), so that an entry can be placed at any position.
"""

from dataclasses import dataclass

import numpy as np
import torch

from chunkcache.errors import InvalidValueError
from chunkcache.identity import ChunkKey, EntryIdentity

_EXPONENT_BITS = {
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}


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
    """

    identity: EntryIdentity
    key: ChunkKey
    k: torch.Tensor
    v: torch.Tensor

    def __post_init__(self) -> None:
        """Shapes agree with each other and with the token ids."""
        if self.k.shape != self.v.shape or self.k.ndim != 4 or self.k.dtype != self.v.dtype:
            raise InvalidValueError(
                f"keys {tuple(self.k.shape)} {self.k.dtype} and values {tuple(self.v.shape)} "
                f"{self.v.dtype} do not form an entry"
            )
        if self.k.shape[1] != len(self.identity.token_ids):
            raise InvalidValueError(
                f"an entry of {len(self.identity.token_ids)} tokens has {self.k.shape[1]} rows"
            )
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
        """Bytes of ``k`` and ``v``."""
        return self.k.nbytes + self.v.nbytes

    def is_finite(self) -> bool:
        """Whether no element is NaN or infinite: those have all bits of their exponent set.

        Layer by layer, with a library that uses no threads: callers are not the engine's thread
        (see ``short_thread``).
        """
        bits, exponent = _EXPONENT_BITS[self.k.dtype]
        return not any(
            int(np.bitwise_and(layer, exponent).max()) == exponent
            for tensor in (self.k, self.v)
            for layer in tensor.view(bits).numpy()
        )
