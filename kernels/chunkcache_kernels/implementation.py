"""Owns which implementation of an operator runs; knows nothing about any operator.

An operator asks ``chosen(device)`` at each call. Without an override the device decides: the
Triton kernels on CUDA, the tuned torch path on the CPU. Tests force each implementation in turn
with ``use_implementation``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

import torch

Implementation = Literal["reference", "cpu", "triton"]

_override: ContextVar[Implementation | None] = ContextVar("_override", default=None)


@contextmanager
def use_implementation(name: Implementation) -> Iterator[None]:
    """Run every operator called inside the block, in this context, with one implementation.

    Args:
        name: The implementation to use whatever the device.

    Raises:
        ValueError: ``name`` is not an implementation.
    """
    if name not in get_args(Implementation):
        raise ValueError(f"implementation must be one of {get_args(Implementation)}, not {name!r}")
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def chosen(device: torch.device) -> Implementation:
    """Return the implementation to run for tensors on ``device``."""
    forced = _override.get()
    if forced is not None:
        return forced
    return "triton" if device.type == "cuda" else "cpu"
