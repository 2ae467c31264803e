"""The beginning of a prompt that is in its pages before anything runs.

It comes from another prompt's pages, and has the bits that running it would have given.
"""

from dataclasses import dataclass

from chunkcache.fusion.prompt_use import EXACT, FUSED, PromptUse


@dataclass(frozen=True)
class ReadyTokens:
    """Tokens at the front of a prompt whose keys and values are there.

    Attributes:
        uses: Per token ``EXACT`` or ``FUSED``: whether it is what a full prefill gives.
    """

    uses: bytes = b""

    @classmethod
    def exact(cls, num_tokens: int) -> "ReadyTokens":
        """A full prefill's."""
        return cls(bytes([EXACT]) * num_tokens)

    @classmethod
    def of(cls, use: PromptUse, num_tokens: int, *, is_exact: bool) -> "ReadyTokens":
        """What the beginning of a prompt that has run is to another that begins with it.

        Args:
            use: What became of its tokens.
            num_tokens: Length of the beginning.
            is_exact: Whether its answer was a full prefill's by construction.
        """
        if is_exact:
            return cls.exact(num_tokens)
        # Nothing stands in front of the opening, so it is exact whether it ran or was placed.
        num_opening = min(use.layout.opening_end, num_tokens)
        rest = use.uses[num_opening:num_tokens]
        return cls(bytes([EXACT]) * num_opening + bytes(u if u == EXACT else FUSED for u in rest))

    def __len__(self) -> int:
        return len(self.uses)

    @property
    def num_exact(self) -> int:
        """How many are what a full prefill gives."""
        return self.uses.count(EXACT)


NOTHING_READY = ReadyTokens()
