"""Owns what an operator says about itself: axes, inputs, reference, tolerances, hardware floor.

One object per operator feeds the tests, the benchmark and the documentation. Knows no operator.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chunkcache_kernels.implementation import Implementation, use_implementation

AXES: Mapping[str, str] = {
    "B": "sequences in a decode batch",
    "C": "distinct rotations of a model",
    "D": "head dim",
    "Drot": "rotated dims of a head",
    "G": "groups of consecutive tokens that share scales",
    "Hkv": "key/value heads",
    "Hq": "query heads, a multiple of Hkv",
    "L": "layers",
    "N": "blocks in a block table",
    "P": "pages",
    "R": "selected rows",
    "S": "slots per page",
    "T": "tokens",
}

Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Tolerance:
    """Largest allowed difference from the reference, as in ``torch.testing.assert_close``."""

    rtol: float
    atol: float


@dataclass(frozen=True)
class Floor:
    """The work no implementation can avoid; a benchmark divides it by the measured time.

    Attributes:
        moved_bytes: Bytes that must be read or written once.
        num_flops: Multiplications and additions of the matrix products.
    """

    moved_bytes: int
    num_flops: int


@dataclass(frozen=True)
class OperatorSpec:
    """One operator, described for tests, benchmark and documentation.

    Attributes:
        name: Name of the public function.
        axes: Letters of its shapes, keys of ``AXES``.
        make_inputs: ``make_inputs(seed, **shape)`` gives its keyword arguments; the same seed and
            shape give the same numbers. Slots that the operator must not read hold NaN.
        run: Calls the public function, on copies where it writes, and returns what it computed.
        implementations: What ``use_implementation`` offers for it; ``reference`` is first.
        tolerances: Allowed difference from the reference by the type of what is written.
        floor: Unavoidable work for given inputs.
    """

    name: str
    axes: tuple[str, ...]
    make_inputs: Callable[..., Inputs]
    run: Callable[[Inputs], tuple[Tensor, ...]]
    implementations: tuple[Implementation, ...]
    tolerances: Mapping[torch.dtype, Tolerance]
    floor: Callable[[Inputs], Floor]

    def __post_init__(self) -> None:
        unknown = set(self.axes) - set(AXES)
        assert not unknown, f"{self.name} uses axes without a meaning: {unknown}"
        assert self.implementations[0] == "reference", self.implementations

    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """Return what the reference computes for these inputs."""
        with use_implementation("reference"):
            return self.run(inputs)

    def check(self, implementation: Implementation, inputs: Inputs, dtype: torch.dtype) -> None:
        """Compare one implementation with the reference.

        Args:
            implementation: What to run.
            inputs: Keyword arguments from ``make_inputs``.
            dtype: Type of the pages, which selects the tolerance.

        Raises:
            AssertionError: They differ by more than the tolerance.
        """
        tolerance = self.tolerances[dtype]
        with use_implementation(implementation):
            computed = self.run(inputs)
        for actual, expected in zip(computed, self.reference(inputs), strict=True):
            torch.testing.assert_close(
                actual, expected, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True
            )


def num_bytes(*tensors: Tensor) -> int:
    """Bytes of the elements of these tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
