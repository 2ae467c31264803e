"""What the policy ``auto`` has learned of a model: how far answers are off, given what it can see.

A table is fitted on questions whose full prefill is known, and holds for one model, preparation and
codec. Knows the arithmetic of an estimate, not where tables come from or are kept.
"""

import math
from collections.abc import Sequence
from typing import Final

import msgspec

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
        margin: What is added to a prediction, a logarithm, for a bound that nine questions in ten are
            within at every ratio.
    """

    model_name: str
    preparation: str
    codec: str
    fingerprint: str
    num_questions: int
    num_context_tokens: int
    choices: tuple[AutoRatio, ...]
    margin: float

    @property
    def ratios(self) -> tuple[float, ...]:
        """The ratios that it knows of, ascending."""
        return tuple(choice.ratio for choice in self.choices)

    def bound(self, index: int, signals: Sequence[float]) -> float:
        """Bound on the mean KL divergence, in nats, of an answer behind a row set.

        Args:
            index: Which of the choices.
            signals: Of its row set.
        """
        constant, *weights = self.choices[index].weights
        predicted = constant + sum(w * x for w, x in zip(weights, signals, strict=True))
        return math.exp(min(predicted + self.margin, 50.0))
