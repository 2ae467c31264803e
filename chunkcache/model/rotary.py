"""Rotation tables, always from the model's own rotary module, always in fp32."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chunkcache.model.spec import RopeSpec

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

    def __init__(self, module: nn.Module, rope: RopeSpec) -> None:
        self._module: Any = module
        self._rope = rope
        self._cached: RotaryTables | None = None

    def tables(self, length_tokens: int) -> RotaryTables:
        """Tables of positions ``0 .. length_tokens - 1`` for a sequence of that length.

        Where the rotation does not depend on the length, a longer cached table serves.
        """
        cached, length_dependent = self._cached, self._rope.is_length_dependent
        if cached is not None:
            have = cached.cos.shape[1]
            if have == length_tokens or (not length_dependent and have > length_tokens):
                return cached.take(slice(0, length_tokens))
        num_positions = (
            length_tokens if length_dependent else -(-length_tokens // _ROUND_UP) * _ROUND_UP
        )
        made = self._make(torch.arange(num_positions))
        self._cached = made
        return made.take(slice(0, length_tokens))

    def between(self, start: int, end: int, length_tokens: int) -> RotaryTables:
        """Tables of positions ``start .. end - 1`` alone, for a sequence of ``length_tokens``.

        For a look at far positions: nothing is made for those in front, and nothing is remembered.
        """
        assert 0 <= start <= end <= length_tokens
        positions = torch.cat([torch.arange(start, end), torch.tensor([length_tokens - 1])])
        return self._make(positions).take(slice(0, end - start))

    def _make(self, positions: torch.Tensor) -> RotaryTables:
        # The module changes its own buffers: they must not become inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            self._forget_length()
            device = next(iter(self._module.buffers())).device
            probe = torch.empty(0, dtype=torch.float32, device=device)
            index = positions.to(device)[None]
            pairs = [
                self._module(probe, index, *(() if kind is None else (kind,)))
                for kind in self._rope.layer_types
            ]
            cos, sin = (torch.cat(tables).contiguous() for tables in zip(*pairs, strict=True))
        return RotaryTables(cos, sin, self._rope.table_of_layer)

    def _forget_length(self) -> None:
        """Undo what a length-dependent module remembers of the longest sequence it has seen.

        The library keeps the base it derived for it; a prompt's rotation must not depend on which
        prompts came before.
        """
        if not self._rope.is_length_dependent:
            return
        module = self._module
        for kind in self._rope.layer_types:
            prefix = "" if kind is None else f"{kind}_"
            original = getattr(module, f"{prefix}original_inv_freq")
            module.register_buffer(f"{prefix}inv_freq", original.clone(), persistent=False)
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
