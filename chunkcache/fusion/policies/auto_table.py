"""What the policy ``auto`` has learned of a model: how far answers are off, given what it can see.

A table is fitted on questions whose full prefill is known, and holds for one model, preparation and
codec. Knows the arithmetic of an estimate, not where tables come from or are kept.
"""

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from chunkcache.errors import InvalidValueError

CONFIDENCE: Final = 0.9
"""Share of the requests that meet their target."""


class AutoRatio(msgspec.Struct, frozen=True):
    """One ratio.

    Attributes:
        ratio: Share of the candidates that run.
        weights: Of 1 and of the row set's signals, in the sum that predicts the logarithm of the
            mean KL divergence (nats).
    """

    ratio: float
    weights: tuple[float, ...]


class AutoTarget(msgspec.Struct, frozen=True):
    """What a target takes.

    Attributes:
        target_kl: Mean KL divergence over the answer, in nats.
        margin: What is added to a prediction, a logarithm, before it is compared with the target's.
    """

    target_kl: float
    margin: float


class AutoTable(msgspec.Struct, frozen=True):
    """A calibration.

    Attributes:
        model_name: Display name.
        preparation: What chunks were prefilled behind.
        codec: How entries were kept.
        fingerprint: Names model, preparation and codec, in hex.
        num_questions: Questions that it was fitted on.
        num_context_tokens: Chunk tokens of the longest of their prompts.
        choices: By ratio, ascending.
        targets: By target, ascending.
    """

    model_name: str
    preparation: str
    codec: str
    fingerprint: str
    num_questions: int
    num_context_tokens: int
    choices: tuple[AutoRatio, ...]
    targets: tuple[AutoTarget, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """The ratios that it knows of, ascending."""
        return tuple(choice.ratio for choice in self.choices)

    @property
    def least_target(self) -> float:
        """The smallest target that it has a margin for."""
        return self.targets[0].target_kl

    def check(self, target_kl: float) -> None:
        """Refuse a target that no row set can be said to meet.

        Raises:
            InvalidValueError: It is under all that were calibrated.
        """
        if target_kl < self.least_target:
            raise InvalidValueError(
                f"target_kl {target_kl:g} is under {self.least_target:g}, the least that `auto` is "
                f"calibrated for on {self.model_name}; the policy `full` meets any",
                param="target_kl",
            )

    def margin(self, target_kl: float) -> float:
        """The margin of a target: the larger one of the two calibrated targets it lies between."""
        self.check(target_kl)
        below = max(t.target_kl for t in self.targets if t.target_kl <= target_kl)
        above = min((t.target_kl for t in self.targets if t.target_kl >= target_kl), default=below)
        return max(t.margin for t in self.targets if below <= t.target_kl <= above)

    def bound(self, index: int, signals: Sequence[float], target_kl: float) -> float:
        """Bound on the mean KL divergence, in nats, of an answer behind a row set.

        Args:
            index: Which of the choices.
            signals: Of its row set.
            target_kl: The target, whose margin counts.
        """
        constant, *weights = self.choices[index].weights
        predicted = constant + sum(w * x for w, x in zip(weights, signals, strict=True))
        return math.exp(min(predicted + self.margin(target_kl), 50.0))
