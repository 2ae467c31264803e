"""How far a pre-caching run is, and how long the rest may take. Knows nothing of terminals."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    """Counts bytes done while a run takes its items.

    Args:
        sized_items: What the run will take, in order.
    """

    def __init__(self, sized_items: Sequence[SizedItem]) -> None:
        self._sized_items = sized_items
        self.total_bytes = sum(s.num_bytes for s in sized_items)
        self.num_items = len(sized_items)
        self.done_bytes = 0
        self._running_bytes = 0
        self._done_tokens = 0
        self._prefilled_bytes = 0
        self._progress: PrecacheProgress | None = None

    def items(self) -> "Iterator[Item]":
        """The items; asking for the next one means that the one before is done."""
        for sized in self._sized_items:
            self._running_bytes = sized.num_bytes
            yield sized.item
            self._running_bytes = 0
            self.done_bytes += sized.num_bytes
            if self._prefilled_tokens > self._done_tokens:
                self._prefilled_bytes += sized.num_bytes
                self._done_tokens = self._prefilled_tokens

    def take(self, progress: "PrecacheProgress") -> None:
        """Take what the run last reported."""
        self._progress = progress

    @property
    def reached_bytes(self) -> float:
        """Bytes done, those of the document at hand estimated from its prefilled tokens."""
        running = (self._prefilled_tokens - self._done_tokens) * self._bytes_per_token
        return self.done_bytes + min(running, self._running_bytes)

    @property
    def remaining_seconds(self) -> float | None:
        """How long the rest takes if none of it is cached yet; None before the first chunk."""
        rate = self._progress.tokens_per_second if self._progress else 0.0
        if not rate:
            return None
        return (self.total_bytes - self.reached_bytes) / (rate * self._bytes_per_token)

    @property
    def _prefilled_tokens(self) -> int:
        return self._progress.prefilled_tokens if self._progress else 0

    @property
    def _bytes_per_token(self) -> float:
        if not self._done_tokens:
            return TYPICAL_BYTES_PER_TOKEN
        return self._prefilled_bytes / self._done_tokens
