"""Activations whose bits do not depend on where an element stands, nor on the number of threads.

The library runs such a function on whole vectors of elements and finishes each thread's share one
element at a time, by other code with other last bits. Which elements those are depends on how many
there are, and on the number of threads.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

VECTOR_ELEMENTS: Final = 64
"""A multiple of what any of the library's loops takes at once."""
_LEAST_SHARE: Final = 32768
"""Elements that the library gives a thread at least, before it takes a further thread."""
_LONE_SHARE: Final = 16384
"""Elements that one thread does, whatever the function: some are shared out equally among all
threads beyond that, whatever they would leave for each."""
_NAMES: Final = ("act_fn", "activation_fn")
"""What families call the activation of an MLP."""


class SteadyActivation(nn.Module):
    """An activation, in whole vectors.

    Args:
        activation: The model's own.
    """

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._activation = activation

    def forward(self, rows: Tensor) -> Tensor:
        """Rows of any shape to their activations."""
        return in_whole_vectors(self._activation, rows)


def steady_activations(mlp: Any) -> None:
    """Have the activation of a layer's MLP, a block of experts apart, done in whole vectors."""
    for name in _NAMES:
        activation = getattr(mlp, name, None)
        if activation is not None and not isinstance(activation, SteadyActivation):
            setattr(mlp, name, SteadyActivation(activation))


def in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise function so that every thread's share is whole vectors.

    Args:
        function: Gives a tensor of the shape and type of the one that it is given.
        x: Any shape and type.

    Returns:
        A tensor of the shape of ``x``.
    """
    if x.device.type != "cpu":
        return function(x)
    flat = x.reshape(-1)
    num_elements = len(flat)
    num_added = -num_elements % VECTOR_ELEMENTS
    if num_added:
        flat = torch.cat([flat, flat.new_zeros(num_added)])
    num_even = _num_even(len(flat), torch.get_num_threads())
    shares = (flat[:num_even], *flat[num_even:].split(_LONE_SHARE))
    parts = [function(share) for share in shares if len(share)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts or [flat])
    return out[:num_elements].view(x.shape)


def _num_even(num_elements: int, num_threads: int) -> int:
    """The largest number of first elements that the library shares out in whole vectors."""
    for num_shares in range(_num_shares(num_elements, num_threads), 0, -1):
        step = VECTOR_ELEMENTS * math.lcm(num_shares, num_threads)
        num_even = num_elements // step * step
        if _num_shares(num_even, num_threads) == num_shares:
            return num_even
    return 0


def _num_shares(num_elements: int, num_threads: int) -> int:
    return max(1, min(num_threads, -(-num_elements // _LEAST_SHARE)))
