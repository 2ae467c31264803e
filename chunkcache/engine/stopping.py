"""Stop strings: an answer ends in front of the first of them, and never shows a part of one.

Works on text as it becomes certain, whatever the tokens are.
"""

from collections.abc import Sequence


class StopMatcher:
    """Looks for stop strings in a growing text.

    The text is judged as if it came character by character: the string that is complete first
    counts, and of those complete at the same character the longest.

    Args:
        stop: The strings, none of them empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        assert all(stop), stop
        self._stop = tuple(dict.fromkeys(stop))
        self._held = ""
        self._is_matched = False

    @property
    def is_matched(self) -> bool:
        """Whether a stop string has come."""
        return self._is_matched

    @property
    def is_holding(self) -> bool:
        """Whether text is held back that may yet turn out to begin a stop string."""
        return bool(self._held)

    def push(self, text: str) -> str:
        """Add text; returns what is now certain to stand in front of any stop string."""
        if self._is_matched:
            return ""
        pending = self._held + text
        ends = [(i + len(s), -len(s)) for s in self._stop if (i := pending.find(s)) >= 0]
        if ends:
            end, negative_length = min(ends)
            self._is_matched, self._held = True, ""
            return pending[: end + negative_length]
        num_held = max((_overlap(pending, s) for s in self._stop), default=0)
        self._held = pending[len(pending) - num_held :]
        return pending[: len(pending) - num_held]

    def finish(self) -> str:
        """The text held back, once nothing follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop`` without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
