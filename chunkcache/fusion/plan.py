"""The plan of one fusion: which policy really runs, over which entries, and why.

Everything that can be decided before any model work is decided here, so that a dry run shows it.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Literal

from chunkcache.fusion.layout import ChunkRef, Layout, PromptStyle, Turn, build_layout
from chunkcache.fusion.policies.full import Full
from chunkcache.fusion.policy import Policy
from chunkcache.fusion.recompute import MaskPositions
from chunkcache.identity import EntryIdentity
from chunkcache.model.template import PromptTemplate
from chunkcache.results import ReuseWarning

OnMiss = Literal["prefill", "error", "skip"]


@dataclass(frozen=True)
class FusionLimits:
    """Where fusion cannot pay, so that a full prefill runs instead.

    Attributes:
        min_context_tokens: Fewer chunk tokens than this.
        min_mean_chunk_tokens: Smaller chunks than this on average.
        max_ratio: A recompute ratio of this or more.
        full_only: Everywhere: the model's gate found that reused chunks are not right.
    """

    min_context_tokens: int
    min_mean_chunk_tokens: int
    max_ratio: float
    full_only: bool = False


@dataclass(frozen=True)
class PromptParts:
    """What a prompt is laid out from.

    Attributes:
        template: The model's fixed segments.
        system_ids: The system prompt's tokens.
        turns: The messages with their documents; a single question is one turn.
        style: How the messages are put.
        answer_ids: An answer that rides along to be scored: the logits behind each of its tokens
            come out beside those behind the prompt.
    """

    template: PromptTemplate
    system_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    style: PromptStyle = "question"
    answer_ids: tuple[int, ...] = ()

    @property
    def chunks(self) -> list[ChunkRef]:
        """All chunks, in prompt order."""
        return [c for turn in self.turns for chunks in turn.documents for c in chunks]

    def layout(self) -> Layout:
        """Lay it out."""
        return build_layout(self.template, self.system_ids, self.turns, self.answer_ids, self.style)

    def without(self, skipped: AbstractSet[int]) -> "PromptParts":
        """The same prompt without some chunks (by index over all documents)."""
        turns = []
        index = 0
        for turn in self.turns:
            documents = []
            for chunks in turn.documents:
                kept = tuple(c for i, c in enumerate(chunks, index) if i not in skipped)
                index += len(chunks)
                if kept:
                    documents.append(kept)
            turns.append(replace(turn, documents=tuple(documents)))
        return replace(self, turns=tuple(turns))


@dataclass(frozen=True)
class FusionPlan:
    """What one fusion will do.

    Attributes:
        parts: The prompt's parts.
        layout: The prompt with every chunk in it.
        identities: Per chunk segment, the entry it wants.
        policy: The policy that runs.
        requested_policy: The one asked for.
        preparation: Canonical text of the preparation.
        reuse_is_lossless: Whether an entry placed behind what it was prefilled behind is exact: the
            codec keeps the compute dtype, and the rotation does not depend on the prompt's length.
        on_miss: What to do about a chunk without an entry.
        warnings: Fallbacks decided here.
        mask_positions: Another mask than the right one; set by the evaluation alone.
    """

    parts: PromptParts
    layout: Layout
    identities: tuple[EntryIdentity, ...]
    policy: Policy
    requested_policy: Policy
    preparation: str
    reuse_is_lossless: bool
    on_miss: OnMiss
    warnings: tuple[ReuseWarning, ...]
    mask_positions: MaskPositions | None = None

    def __post_init__(self) -> None:
        """One identity per chunk, naming its tokens."""
        assert len(self.identities) == len(self.layout.chunks)

    def is_exact_at(self, start: int, layout: Layout) -> bool:
        """Whether an entry placed at ``start`` equals a full prefill's keys and values there.

        True for the first chunk of a prompt whose opening is what the chunk was prefilled behind.
        """
        if not self.reuse_is_lossless or not self.identities or start != layout.prefix_end:
            return False
        return layout.token_ids[:start] == self.identities[0].prefix_ids

    def over(self, parts: PromptParts) -> "FusionPlan":
        """The same decisions for a prompt of some of these chunks, or with an answer to be scored.

        Args:
            parts: Its chunks are among this plan's.
        """
        layout = parts.layout()
        wanted = dict(zip((s.chunk for s in self.layout.chunks), self.identities, strict=True))
        identities = tuple(wanted[s.chunk] for s in layout.chunks)
        return replace(self, parts=parts, layout=layout, identities=identities)

    def in_full(self) -> "FusionPlan":
        """A full prefill of the same prompt."""
        return replace(self, policy=Full(), requested_policy=Full(), warnings=())

    def scoring(self, answer_ids: Sequence[int]) -> "FusionPlan":
        """The same fusion with a given answer riding along, whose tokens are scored.

        A chunk that has lost its entry meanwhile is computed again: the entry has the same bits.
        """
        parts = replace(self.parts, answer_ids=tuple(answer_ids))
        return replace(self.over(parts), on_miss="prefill")


def plan_fusion(
    parts: PromptParts,
    identities: Sequence[EntryIdentity],
    policy: Policy,
    *,
    preparation: str,
    reuse_is_lossless: bool,
    on_miss: OnMiss,
    limits: FusionLimits,
) -> FusionPlan:
    """Decide what runs.

    Args:
        parts: The prompt.
        identities: Per chunk, in order, the entry it wants.
        policy: The policy asked for.
        preparation: Canonical text of the preparation.
        reuse_is_lossless: Whether an entry placed behind what it was prefilled behind is exact.
        on_miss: What to do about a chunk without an entry.
        limits: Where a full prefill runs instead.
    """
    layout = parts.layout()
    warning = _why_full(layout, policy, limits)
    runs_full = warning is not None or not layout.chunks
    return FusionPlan(
        parts=parts,
        layout=layout,
        identities=tuple(identities),
        policy=Full() if runs_full else policy,
        requested_policy=policy,
        preparation=preparation,
        reuse_is_lossless=reuse_is_lossless,
        on_miss=on_miss,
        warnings=() if warning is None else (warning,),
    )


def _why_full(layout: Layout, policy: Policy, limits: FusionLimits) -> ReuseWarning | None:
    if not policy.places_entries or not layout.chunks:
        return None
    if limits.full_only:
        return ReuseWarning(
            "model_full_only", "the model's check failed for reused chunks: ran in full"
        )
    num_tokens = layout.num_context_tokens
    if num_tokens < limits.min_context_tokens:
        return ReuseWarning(
            "context_too_short",
            f"{num_tokens} context tokens, under {limits.min_context_tokens}: ran in full",
        )
    mean_tokens = num_tokens / len(layout.chunks)
    if mean_tokens < limits.min_mean_chunk_tokens:
        return ReuseWarning(
            "chunks_too_short",
            f"{mean_tokens:.0f} tokens per chunk, under {limits.min_mean_chunk_tokens}: "
            "ran in full",
        )
    ratio = policy.nominal_ratio
    if ratio is not None and ratio >= limits.max_ratio:
        return ReuseWarning(
            "ratio_too_high",
            f"recompute ratio {ratio:g}, at or over {limits.max_ratio:g}: ran in full",
        )
    return None
