"""Milliseconds by stage of one piece of work that is interrupted now and then."""

import time
from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Stopwatch:
    """Adds up what passes between laps.

    Attributes:
        spent_ms: By stage.
    """

    spent_ms: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _since: float = field(default_factory=time.perf_counter)

    def lap(self, stage: str) -> float:
        """Count what has passed since the last lap to a stage; returns it."""
        now = time.perf_counter()
        elapsed_ms = (now - self._since) * 1e3
        self._since = now
        self.spent_ms[stage] += elapsed_ms
        return elapsed_ms

    def restart(self) -> None:
        """Leave out what happened since the last lap: somebody did other work."""
        self._since = time.perf_counter()
