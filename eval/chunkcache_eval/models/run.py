"""Everything ``chunkcache eval models`` measures, as one report."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch

from chunkcache.errors import InvalidValueError, UnsupportedModelError
from chunkcache.settings import load_settings
from chunkcache_eval.int8_weights import Int8WeightsCost, measure_int8_weights
from chunkcache_eval.models.cells import CELLS
from chunkcache_eval.models.digest import DigestResult, measure_digest
from chunkcache_eval.models.matrix import (
    BF16_NOISE_FACTOR,
    KEY_LIMIT,
    LOGIT_LIMIT,
    CellResult,
    measure_matrix,
)
from chunkcache_eval.models.real import RealResult, measure_real

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ModelsRequest:
    """What to measure.

    Attributes:
        families: Families of the matrix; none for all.
        ropes: Rotations of the matrix; none for all.
        models: Real models, by name or path.
        num_prompts: Prompts per real model.
        digest_mb: Size of the file that is digested; 0 leaves the digest out.
        with_matrix: Whether the matrix is measured at all.
        with_int8: Whether real models are measured with int8 weights too.
    """

    families: tuple[str, ...] = ()
    ropes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    num_prompts: int = 20
    digest_mb: int = 500
    with_matrix: bool = True
    with_int8: bool = True

    @property
    def cells(self) -> list[tuple[str, str]]:
        """The cells that were asked for."""
        if not self.with_matrix:
            return []
        return [
            (family, rope)
            for family, rope in CELLS
            if (not self.families or family in self.families)
            and (not self.ropes or rope in self.ropes)
        ]


@dataclass(frozen=True)
class ModelsReport:
    """What was measured; parts that were not asked for are empty.

    Attributes:
        matrix: Families with rotations.
        real: Real models.
        int8: Real models with int8 weights, beside their own.
        digest: Times of a digest.
    """

    matrix: tuple[CellResult, ...]
    real: tuple[RealResult, ...]
    int8: tuple[Int8WeightsCost, ...]
    digest: DigestResult | None

    @property
    def failures(self) -> list[str]:
        """What is over its limit."""
        cells = [f"{c.family} with {c.rope} rotation" for c in self.matrix if not c.passed]
        return cells + [r.model for r in self.real if not r.passed]

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "passed": not self.failures,
            "failures": self.failures,
            "limits": {
                "max_logit_diff": LOGIT_LIMIT,
                "layer0_k_diff": KEY_LIMIT,
                "bf16_noise_factor": BF16_NOISE_FACTOR,
            },
            "matrix": [asdict(c) | {"passed": c.passed} for c in self.matrix],
            "real": [asdict(r) | {"passed": r.passed} for r in self.real],
            "int8": [i.to_dict() for i in self.int8],
            "digest": None if self.digest is None else asdict(self.digest),
            "versions": {p: version(p) for p in ("torch", "transformers")},
            "threads": torch.get_num_threads(),
        }


def measure_models(request: ModelsRequest, progress: Progress = lambda line: None) -> ModelsReport:
    """Measure.

    Args:
        request: What.
        progress: Told what is going on, one line at a time.

    Raises:
        ModelError: A real model cannot be loaded or is refused.
    """
    matrix = tuple(measure_matrix(request.cells, progress))
    real = tuple(_real(request.models, request.num_prompts, progress))
    digest = measure_digest(request.digest_mb, progress) if request.digest_mb else None
    int8 = tuple(_int8(request.models if request.with_int8 else (), progress))
    return ModelsReport(matrix, real, int8, digest)


def _real(models: Sequence[str], num_prompts: int, progress: Progress) -> list[RealResult]:
    return [
        measure_real(load_settings(model=model), progress, num_prompts=num_prompts)
        for model in models
    ]


def _int8(models: Sequence[str], progress: Progress) -> Iterator[Int8WeightsCost]:
    for model in models:
        try:
            yield measure_int8_weights(load_settings(model=model), progress=progress)
        except (UnsupportedModelError, InvalidValueError) as error:
            progress(f"{model} is not measured with int8 weights: {error.message}")
