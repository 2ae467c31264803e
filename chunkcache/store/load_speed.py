"""What loading an entry costs against prefilling it, from what was measured here.

A start-up calibration gives first figures; loads and prefills that really happened refine them.
Either way of getting an entry gives the same bits, so this changes times and nothing else. Knows no
tier and no model.
"""

import threading
from collections import Counter, deque
from statistics import median
from typing import Final, Literal

import msgspec

LoadTier = Literal["disk", "remote"]

_NUM_REMEMBERED: Final = 15
_MIN_GAIN_S: Final = 0.005
"""A prefill must be sooner by this, or its bookkeeping and the noise of a clock eat the gain."""
_LOAD_ANYWAY_EVERY: Final = 16
"""Of the loads that seem not to pay, how often one is done all the same: disks recover."""


class Calibration(msgspec.Struct, frozen=True):
    """Figures measured once per model and build.

    Attributes:
        prefill_s_per_row: Seconds of an isolated prefill per row.
        load_s_per_byte: Seconds of reading an entry that is in the page cache, checks included.
    """

    prefill_s_per_row: float
    load_s_per_byte: float


class LoadSpeed:
    """Decides whether to load. Safe to use from several threads.

    Args:
        calibration: First figures.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._lock = threading.Lock()
        self._load_s_per_byte = deque([calibration.load_s_per_byte], maxlen=_NUM_REMEMBERED)
        self._remote_s_per_byte: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._prefill_s_per_row = deque([calibration.prefill_s_per_row], maxlen=_NUM_REMEMBERED)
        self._num_slow: Counter[LoadTier] = Counter()

    def restart(self, calibration: Calibration) -> None:
        """Forget all figures for those of another model."""
        with self._lock:
            for figures, first in (
                (self._load_s_per_byte, calibration.load_s_per_byte),
                (self._prefill_s_per_row, calibration.prefill_s_per_row),
            ):
                figures.clear()
                figures.append(first)
            self._remote_s_per_byte.clear()

    def note_load(self, num_bytes: int, seconds: float, *, tier: LoadTier = "disk") -> None:
        """An entry was read from a tier, waiting for it included."""
        with self._lock:
            self._loads(tier).append(seconds / num_bytes)

    def note_prefill(self, num_rows: int, seconds: float) -> None:
        """Rows were run through the model for an entry."""
        with self._lock:
            self._prefill_s_per_row.append(seconds / num_rows)

    def figures(self) -> Calibration:
        """Present figures: medians, which one slow read or a busy moment does not move."""
        with self._lock:
            return Calibration(median(self._prefill_s_per_row), median(self._load_s_per_byte))

    def is_slower(self, num_bytes: int, num_rows: int, *, tier: LoadTier = "disk") -> bool:
        """Whether loading an entry takes longer than computing it, by enough to matter.

        Args:
            num_bytes: Of the entry.
            num_rows: That a prefill of it runs.
            tier: Where from. A remote that has given none yet counts as quick.
        """
        with self._lock:
            loads, prefill_s = self._loads(tier), median(self._prefill_s_per_row)
            load_s = num_bytes * median(loads) if loads else 0.0
        return load_s >= num_rows * prefill_s + _MIN_GAIN_S

    def should_load(self, num_bytes: int, num_rows: int, *, tier: LoadTier = "disk") -> bool:
        """Whether to load an entry: where it is not slower, and now and then to see anew.

        Arguments as in :meth:`is_slower`.
        """
        if not self.is_slower(num_bytes, num_rows, tier=tier):
            return True
        with self._lock:
            self._num_slow[tier] += 1
            return self._num_slow[tier] % _LOAD_ANYWAY_EVERY == 0

    def _loads(self, tier: LoadTier) -> deque[float]:
        return self._load_s_per_byte if tier == "disk" else self._remote_s_per_byte
