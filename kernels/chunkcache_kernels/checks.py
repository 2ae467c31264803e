"""Owns the errors of wrongly shaped operator arguments; knows no operator."""

import torch


class KernelArgumentError(ValueError):
    """An operator was called with arguments whose shapes, types or devices do not fit."""


def require(condition: bool, message: str) -> None:
    """Raise ``KernelArgumentError(message)`` unless ``condition`` holds."""
    if not condition:
        raise KernelArgumentError(message)


def require_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raise unless ``tensor`` has exactly the expected shape."""
    require(
        tuple(tensor.shape) == expected,
        f"{name} has shape {tuple(tensor.shape)}, expected {expected}",
    )


def require_dims(name: str, tensor: torch.Tensor, axes: str) -> None:
    """Raise unless ``tensor`` has one dimension per axis named in ``axes``, such as ``T,H,D``."""
    num_axes = axes.count(",") + 1
    require(tensor.dim() == num_axes, f"{name} must be [{axes}], got {tuple(tensor.shape)}")
