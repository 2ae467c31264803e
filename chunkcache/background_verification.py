"""A share of the served answers, verified when the engine is idle.

The full prefill runs beside the answer some time after it was given: no answer waits for it, and
none is changed by it. Only figures are kept, never text.
"""

import threading
from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from chunkcache.engine.engine import Engine
from chunkcache.engine.request import GenerationJob
from chunkcache.engine.stream import Finished
from chunkcache.serving_meter import Histogram, HistogramCounts
from chunkcache.verification import verification_steps

KL_BOUNDS: Final = (1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Nats."""
AGREEMENT_BOUNDS: Final = (0.0, 0.125, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class VerifierStats:
    """A snapshot since the start.

    Attributes:
        sampled: Answers chosen to be verified.
        verified: Of these, verified.
        dropped: Of these, not verified because too many waited, or the engine stopped.
        failed: Of these, not verified because the verification failed.
        mean_kl: Distribution of the verified answers' mean KL, in nats.
        agreement: Distribution of their share of leading tokens that the full prefill gave too.
    """

    sampled: int
    verified: int
    dropped: int
    failed: int
    mean_kl: HistogramCounts
    agreement: HistogramCounts


class BackgroundVerifier:
    """Chooses answers, and has them verified when nobody waits for the engine.

    Args:
        engine: Runs them.
        rate: Share of the answers to choose, within 0 and 1.
    """

    def __init__(self, engine: Engine, rate: float) -> None:
        self._engine = engine
        self._rate = rate
        self._lock = threading.Lock()
        self._num_sampled = self._num_verified = 0
        self._mean_kl = Histogram(KL_BOUNDS)
        self._agreement = Histogram(AGREEMENT_BOUNDS)

    def offer(self, answer_id: str, job: GenerationJob, fused: Finished) -> None:
        """Verify an answer later, if it is chosen. Quick; called on the engine's thread.

        Answers that are exact by construction are never chosen: there is nothing to find out.
        """
        if fused.report.exact or not is_sampled(answer_id, self._rate):
            return
        with self._lock:
            self._num_sampled += 1
        self._engine.when_idle(lambda: self._steps(job, fused))

    def stats(self) -> VerifierStats:
        """A snapshot; sums may be one answer apart."""
        idle = self._engine.idle_counts
        with self._lock:
            return VerifierStats(
                sampled=self._num_sampled,
                verified=self._num_verified,
                dropped=idle.dropped,
                failed=idle.failed,
                mean_kl=self._mean_kl.counts(),
                agreement=self._agreement.counts(),
            )

    def _steps(self, job: GenerationJob, fused: Finished) -> Generator[None, None, None]:
        found = yield from verification_steps(job, fused, self._engine.solo_steps)
        with self._lock:
            self._num_verified += 1
            self._mean_kl.observe(found.mean_kl)
            self._agreement.observe(found.agreement)


def is_sampled(answer_id: str, rate: float) -> bool:
    """Whether an answer is among the share to verify: a function of its id alone.

    An answer chosen at one rate is chosen at every higher one.
    """
    draw = int.from_bytes(blake3(answer_id.encode()).digest(length=7), "little")
    return draw < rate * (1 << 56)
