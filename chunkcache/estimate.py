"""What a policy with a target says of itself: what it chose, and how close it takes its answer to be."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EstimateReport:
    """How close a fusion was asked to come, and how close it takes itself to be.

    Attributes:
        target_kl: Mean KL divergence over the answer, in nats, that was asked for.
        estimated_kl: Bound on it that nine answers in ten are within; 0 where everything ran.
        ratio: Share of the placed chunk tokens that ran.
        ran_full: Whether no smaller share was taken to be enough.
        signals: What the estimate rests on.
    """

    target_kl: float
    estimated_kl: float
    ratio: float
    ran_full: bool
    signals: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """The form of ``chunkcache.estimate`` in a response."""
        return {
            "target_kl": self.target_kl,
            "estimated_kl": round(self.estimated_kl, 6),
            "ratio": self.ratio,
            "ran_full": self.ran_full,
        }
