"""Where every prompt token came from. Counts are made here and nowhere else."""

from dataclasses import asdict, dataclass, field
from typing import Literal

Source = Literal["device", "host", "disk", "remote"]
SOURCES: tuple[Source, ...] = ("device", "host", "disk", "remote")


@dataclass(frozen=True)
class PromptTokenAccount:
    """Every prompt token, counted exactly once.

    Attributes:
        prompt_tokens: Tokens of the assembled prompt.
        exact_prefix_tokens: Reused keys and values that equal a full prefill's.
        fused_tokens: Reused keys and values placed from entries, not recomputed.
        recomputed_tokens: Tokens of cached chunks whose rows were run again.
        computed_tokens: Everything else: template, question, chunks that missed.
        cached_tokens_by_source: ``exact_prefix_tokens + fused_tokens`` by the tier they came from.
        cache_write_tokens: Tokens newly stored by this request (part of ``computed_tokens``).

    The sums are asserted where the account is built: a mismatch is a fault of ours.
    """

    prompt_tokens: int
    exact_prefix_tokens: int
    fused_tokens: int
    recomputed_tokens: int
    computed_tokens: int
    cached_tokens_by_source: dict[Source, int] = field(default_factory=dict)
    cache_write_tokens: int = 0

    def __post_init__(self) -> None:
        """Check the sums."""
        parts = (
            self.exact_prefix_tokens,
            self.fused_tokens,
            self.recomputed_tokens,
            self.computed_tokens,
        )
        assert min(parts) >= 0, parts
        assert sum(parts) == self.prompt_tokens, (parts, self.prompt_tokens)
        assert self.cached_tokens == sum(self.cached_tokens_by_source.values()), self
        assert self.cache_write_tokens <= self.computed_tokens, self

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not run through the model for this request."""
        return self.exact_prefix_tokens + self.fused_tokens

    def by_source(self) -> dict[str, int]:
        """Every prompt token by the tier it came from, or by what was run; sums to the prompt."""
        by_tier = {str(tier): self.cached_tokens_by_source.get(tier, 0) for tier in SOURCES}
        return by_tier | {"recomputed": self.recomputed_tokens, "computed": self.computed_tokens}

    def details(self) -> dict[str, object]:
        """The form of ``usage.prompt_tokens_details``."""
        by_source = {s: self.cached_tokens_by_source.get(s, 0) for s in SOURCES}
        details = asdict(self) | {
            "cached_tokens": self.cached_tokens,
            "cached_tokens_by_source": by_source,
        }
        del details["prompt_tokens"]
        return details
