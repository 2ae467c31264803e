"""What became of every token of a prompt, token by token: for whoever wants to see it."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Literal

from chunkcache.fusion.layout import Layout, Segment

TokenUse = Literal["exact", "fused", "recomputed", "computed"]
"""Reused and equal to a full prefill's; reused as placed; cached but run again; run."""

TOKEN_USES: Final[tuple[TokenUse, ...]] = ("exact", "fused", "recomputed", "computed")
EXACT, FUSED, RECOMPUTED, COMPUTED = range(len(TOKEN_USES))


@dataclass(frozen=True)
class PromptSpan:
    """Consecutive tokens of one segment that the same became of.

    Attributes:
        segment: The segment that they are in.
        use: What became of them.
        start: Position of the first.
        end: One past the last position.
    """

    segment: Segment
    use: TokenUse
    start: int
    end: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens."""
        begin = self.segment.start
        return self.segment.token_ids[self.start - begin : self.end - begin]


@dataclass(frozen=True)
class PromptUse:
    """What became of every token of a prompt.

    Attributes:
        layout: The prompt that was run.
        uses: Per token an index into :data:`TOKEN_USES`.
    """

    layout: Layout
    uses: bytes

    def __post_init__(self) -> None:
        """Every token has a use."""
        assert len(self.uses) == self.layout.num_tokens

    def count(self, use: int) -> int:
        """Tokens of one use."""
        return self.uses.count(use)

    def spans(self) -> Iterator[PromptSpan]:
        """The prompt as spans; together they cover it."""
        for segment in self.layout.segments:
            start = segment.start
            for use, run in groupby(self.uses[start : segment.end]):
                end = start + len(list(run))
                yield PromptSpan(segment, TOKEN_USES[use], start, end)
                start = end
            assert start == segment.end
