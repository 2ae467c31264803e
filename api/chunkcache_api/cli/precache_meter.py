"""How far a pre-caching run is, and how long the rest may take. Knows nothing of terminals."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chunkcache.precache import Item, PrecacheProgress

TYPICAL_BYTES_PER_TOKEN = 4.0
"""Assumed until a document has shown how its text tokenises."""


@dataclass(frozen=True)
class SizedItem:
    """An item of a corpus and the bytes of its text; 0 for one that could not be taken."""

    item: "Item"
    num_bytes: int


class PrecacheMeter:
    """Turns a run's reports into bytes done and seconds left; both are estimates.

    A run says how many items are done, not which: they are taken to be the first ones. A run with a
    second phase does all its work there: its bytes are then shares of the chunks looked at.

    Args:
        sized_items: What the run takes, in order.
        clock: Seconds that never go back.
    """

    def __init__(
        self, sized_items: Sequence[SizedItem], clock: Callable[[], float] = time.monotonic
    ) -> None:
        # Bytes of the first n items, at index n.
        self._bytes_until = [0, *accumulate(s.num_bytes for s in sized_items)]
        self._clock = clock
        self._prefill_began = self._now = clock()
        self._num_done = 0
        self._tokens = self._done_tokens = 0
        self._prefilled_bytes = 0
        self._chunks_to_prepare = self._prepared_chunks = self._chunks_before_prefill = 0

    @property
    def num_items(self) -> int:
        """Items of the run."""
        return len(self._bytes_until) - 1

    @property
    def total_bytes(self) -> int:
        """Bytes of all items."""
        return self._bytes_until[-1]

    @property
    def prefilled_tokens(self) -> int:
        """Tokens prefilled so far."""
        return self._tokens

    def take(self, progress: "PrecacheProgress") -> None:
        """Take a report of the run."""
        self._now = self._clock()
        self._tokens = progress.prefilled_tokens
        if not self._tokens:
            # Documents that were cached already say nothing about the speed of the others.
            self._prefill_began = self._now
            self._chunks_before_prefill = progress.prepared_chunks
        self._chunks_to_prepare = progress.chunks_to_prepare
        self._prepared_chunks = min(progress.prepared_chunks, self._chunks_to_prepare)
        if self._chunks_to_prepare:
            return
        num_done = progress.documents + progress.failures
        if num_done > self._num_done:
            if self._tokens > self._done_tokens:
                self._prefilled_bytes += (
                    self._bytes_until[num_done] - self._bytes_until[self._num_done]
                )
            self._num_done, self._done_tokens = num_done, self._tokens

    @property
    def tokens_per_second(self) -> float:
        """Tokens prefilled since the first document that needed it; 0 before."""
        seconds = self._now - self._prefill_began
        return self._tokens / seconds if seconds and self._tokens else 0.0

    @property
    def reached_bytes(self) -> float:
        """Bytes done, those of the document at hand estimated from its prefilled tokens."""
        if self._chunks_to_prepare:
            return self.total_bytes * self._prepared_chunks / self._chunks_to_prepare
        done_bytes = self._bytes_until[self._num_done]
        next_bytes = self._bytes_until[min(self._num_done + 1, self.num_items)] - done_bytes
        running = (self._tokens - self._done_tokens) * self._bytes_per_token
        return done_bytes + min(running, next_bytes)

    @property
    def remaining_seconds(self) -> float | None:
        """How long the rest takes if none of it is cached yet; None before the first chunk."""
        rate = self.tokens_per_second
        if not rate:
            return None
        if self._chunks_to_prepare:
            num_done = self._prepared_chunks - self._chunks_before_prefill
            num_left = self._chunks_to_prepare - self._prepared_chunks
            seconds = self._now - self._prefill_began
            return seconds / num_done * num_left if num_done > 0 else None
        return (self.total_bytes - self.reached_bytes) / (rate * self._bytes_per_token)

    @property
    def _bytes_per_token(self) -> float:
        if not self._done_tokens:
            return TYPICAL_BYTES_PER_TOKEN
        return self._prefilled_bytes / self._done_tokens
