"""``shift``: as ``deviation``, and every row that stops is moved by what the others were off.

After AgentKVShift: the rows that run are probes. In each later layer, the mean of their fresh keys
and values less their stale ones is added to those of all other candidates, which costs a pass over
the pages and no row.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from chunkcache.fusion.policies.deviation import Deviation
from chunkcache.fusion.policy import Candidates, RowSelection


@dataclass(frozen=True)
class Shift(Deviation):
    """Run what ``deviation`` runs; move the rest by the mean offset of those rows.

    Attributes:
        per_chunk: Whether the mean is over the probes of a row's own chunk (none, no move), or
            over those of the whole prompt.
    """

    per_chunk: bool = False

    name: ClassVar[str] = "shift"

    def select(self, candidates: Candidates) -> RowSelection:
        """The choice of ``deviation``; where all run or none does, nothing is left to move."""
        selection = super().select(candidates)
        if selection.narrowing is None:
            return selection
        scope = "chunk" if self.per_chunk else "prompt"
        return replace(selection, narrowing=replace(selection.narrowing, shift=scope))

    def __str__(self) -> str:
        scope = "chunk" if self.per_chunk else "prompt"
        return f"shift({self.ratio:g}, layer={self.layer}, per={scope})"
