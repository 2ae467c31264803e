"""Choosing the next token: greedy, or drawn from a seeded generator of the request's own."""

import math
from dataclasses import dataclass, replace

import torch

from chunkcache.errors import InvalidValueError
from chunkcache.identity import digest_fields


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes:
        temperature: 0 is greedy; up to 2.
        top_p: Keep the most likely tokens whose probabilities add up to this, in (0, 1].
        top_k: Keep this many of the most likely tokens; None keeps all.
        seed: Seed of the request's generator; draws depend on nothing else.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            InvalidValueError: A field is out of range; ``param`` names it.
        """
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 2.0):
            raise InvalidValueError("temperature is not within 0 and 2", param="temperature")
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise InvalidValueError("top_p is not within (0, 1]", param="top_p")
        if self.top_k is not None and self.top_k < 1:
            raise InvalidValueError("top_k is less than 1", param="top_k")
        if not -(2**63) <= self.seed < 2**63:
            raise InvalidValueError("seed does not fit 64 bits", param="seed")

    def of_answer(self, index: int) -> "SamplingParams":
        """How one of several answers to a request is drawn; the first as if it were alone."""
        if index == 0:
            return self
        digest = digest_fields("answer seed", [("seed", self.seed), ("index", index)])
        return replace(self, seed=int.from_bytes(digest[:8], "little", signed=True))


class Sampler:
    """Draws the tokens of one request."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator().manual_seed(params.seed)

    def draw(self, logits: torch.Tensor) -> int:
        """The next token.

        Args:
            logits: fp32 ``[vocab]``.
        """
        params = self._params
        if params.temperature == 0.0:
            return int(logits.argmax())
        probabilities = torch.softmax(logits.cpu().double() / params.temperature, dim=-1)
        ordered, ids = torch.sort(probabilities, descending=True, stable=True)
        if params.top_k is not None:
            ordered = ordered[: params.top_k]
        if params.top_p < 1.0:
            before = torch.cumsum(ordered, dim=0) - ordered
            ordered = ordered[before < params.top_p]
        cumulative = torch.cumsum(ordered, dim=0)
        threshold = torch.rand(1, generator=self._generator, dtype=torch.float64) * cumulative[-1]
        drawn = int(torch.searchsorted(cumulative, threshold, right=True))
        return int(ids[min(drawn, len(ordered) - 1)])
