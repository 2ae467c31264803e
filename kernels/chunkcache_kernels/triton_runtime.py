"""Owns what every Triton kernel needs of its process; loaded only when a Triton kernel is.

The numbers of a kernel depend on whether products and sums are fused, and Triton's default for
that changes between versions. Loading this module settles it, unless the environment already has.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from chunkcache_kernels.checks import require

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU.

    It keeps bf16 as raw 16-bit integers, and ``tl.dot`` multiplies those; a kernel that multiplies
    matrices must widen them to fp32 first, which gives the same products.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"


def require_runnable(device: torch.device) -> None:
    """Raise unless Triton kernels can run on ``device``: CUDA, or any under the interpreter.

    Raises:
        KernelArgumentError: The tensors are elsewhere.
    """
    require(
        device.type == "cuda" or interpreting(),
        f"Triton kernels run on cuda, or on the CPU with TRITON_INTERPRET=1; tensors are on {device}",
    )


def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """Return the launch of a jitted kernel on a grid.

    Typed loosely because a launch takes plain integers where the kernel declares ``constexpr``.
    """
    return kernel[grid]
