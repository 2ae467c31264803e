"""``lego``: the first tokens of every chunk run again.

After EPIC (Hu et al. 2024, "EPIC: Efficient Position-Independent Context Caching for Serving
Large Language Models", arXiv:2410.15332): tokens at a chunk's start hold the attention sink of its
isolated prefill.
"""

from dataclasses import dataclass
from typing import ClassVar

from chunkcache.errors import InvalidValueError
from chunkcache.fusion.policy import Candidates, Policy, RowSelection


@dataclass(frozen=True)
class Lego(Policy):
    """Run the first ``num_tokens`` tokens of each chunk that is not exact."""

    num_tokens: int = 4

    name: ClassVar[str] = "lego"
    is_question_blind: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """At least none."""
        if self.num_tokens < 0:
            raise InvalidValueError("lego's number of tokens is negative", param="first_tokens")

    def select(self, candidates: Candidates) -> RowSelection:
        """By offset alone."""
        return RowSelection(candidates.offset_in_chunk < self.num_tokens)

    def __str__(self) -> str:
        return f"lego({self.num_tokens})"
