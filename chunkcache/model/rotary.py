"""Rotation tables, always from the model's own rotary module, always in fp32."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_ROUND_UP = 1024
"""Tables that do not depend on the length are made in steps of this many positions."""


@dataclass(frozen=True)
class RotaryTables:
    """cos and sin for a set of positions.

    Attributes:
        cos: ``[num_tables, num_positions, rotary_dim]`` fp32, attention scaling included.
        sin: Same shape.
        table_of_layer: Per layer, the row of ``cos`` it uses, or -1 for a layer without RoPE.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    table_of_layer: tuple[int, ...]

    def take(self, index: torch.Tensor | slice) -> "RotaryTables":
        """The tables of some of the positions."""
        return RotaryTables(self.cos[:, index], self.sin[:, index], self.table_of_layer)

    def for_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Cos and sin ``[num_positions, rotary_dim]`` of one layer, None without RoPE."""
        table = self.table_of_layer[layer]
        return None if table < 0 else (self.cos[table], self.sin[table])


class Rotary:
    """Asks the model's rotary module for tables.

    Length-dependent rotations (dynamic NTK, longrope) look at the largest position they are asked
    for, so a table is always made for positions ``0 .. length - 1`` of the assembled prompt and
    the wanted positions are taken from it.
    """

    def __init__(self, module: nn.Module, num_layers: int, length_dependent: bool) -> None:
        self._module: Any = module
        self._table_of_layer = (0,) * num_layers
        self._length_dependent = length_dependent
        self._cached: RotaryTables | None = None

    def tables(self, length_tokens: int) -> RotaryTables:
        """Tables of positions ``0 .. length_tokens - 1`` for a sequence of that length.

        Where the rotation does not depend on the length, a longer cached table serves.
        """
        cached = self._cached
        if cached is not None:
            have = cached.cos.shape[1]
            if have == length_tokens or (not self._length_dependent and have > length_tokens):
                return cached.take(slice(0, length_tokens))
        made = self._make(
            length_tokens if self._length_dependent else -(-length_tokens // _ROUND_UP) * _ROUND_UP
        )
        self._cached = made
        return made.take(slice(0, length_tokens))

    def _make(self, length_tokens: int) -> RotaryTables:
        # The module changes its own buffers: they must not become inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            self._forget_length()
            parameter = next(iter(self._module.buffers()))
            probe = torch.empty(0, dtype=torch.float32, device=parameter.device)
            positions = torch.arange(length_tokens, device=parameter.device)[None]
            cos, sin = self._module(probe, positions)
        return RotaryTables(cos, sin, self._table_of_layer)

    def _forget_length(self) -> None:
        """Undo what a length-dependent module remembers of the longest sequence it has seen.

        The library keeps the base it derived for it; a prompt's rotation must not depend on which
        prompts came before.
        """
        module = self._module
        original = getattr(module, "original_inv_freq", None)
        if self._length_dependent and original is not None:
            module.register_buffer("inv_freq", original.clone(), persistent=False)
            module.max_seq_len_cached = module.original_max_seq_len
