"""Counting: what was reused of one prompt, token by token and document by document."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chunkcache.accounting import PromptTokenAccount
from chunkcache.fusion.layout import Layout, Segment
from chunkcache.fusion.prompt_use import COMPUTED, EXACT, FUSED, RECOMPUTED, PromptUse
from chunkcache.fusion.ready import ReadyTokens
from chunkcache.results import ChunkSource, DocumentReport
from chunkcache.store.lease import Lease, Source


@dataclass
class LoadedChunk:
    """What became of one chunk of the plan.

    Attributes:
        segment: Where the plan's layout has it.
        source: Where its entry came from, or why there is none; ``device`` where it was in the
            pages from the start.
        load_ms: Time to load its entry, or to compute it.
        lease: The entry, until it is placed.
        has_entry: Whether an entry was placed for it.
        is_stored: Whether the entry is in the store (and not computed and lost).
        is_exact: Whether it equals a full prefill's keys and values where it stands.
    """

    segment: Segment
    source: ChunkSource
    load_ms: float
    lease: Lease | None = None
    has_entry: bool = False
    is_stored: bool = False
    is_exact: bool = False


@dataclass(frozen=True)
class Reuse:
    """How much of a prompt was reused.

    Attributes:
        account: Every prompt token, by where it came from.
        use: The same token by token.
        documents: The same per document.
        num_inexact: Reused tokens that a full prefill would have given other values.
    """

    account: PromptTokenAccount
    use: PromptUse
    documents: tuple[DocumentReport, ...]
    num_inexact: int


_SLOWEST_FIRST: tuple[ChunkSource, ...] = (
    "skipped",
    "computed",
    "remote",
    "disk",
    "host",
    "device",
    "not_loaded",
)


def count_reuse(
    layout: Layout,
    loaded: Sequence[LoadedChunk],
    opening: Source | None,
    recomputed: set[int],
    ready: ReadyTokens,
) -> Reuse:
    """Count every prompt token once, and per document.

    Args:
        layout: The prompt that was run.
        loaded: The plan's chunks, in order.
        opening: Where the entry of the prompt's opening came from, if it was placed.
        recomputed: Positions of placed chunk tokens whose rows ran again.
        ready: Tokens at the front that another prompt's pages held.
    """
    by_source: Counter = Counter()
    written = num_inexact = 0
    uses = bytearray([COMPUTED]) * layout.num_tokens
    ran_again = bytearray(layout.num_tokens)
    for position in recomputed:
        ran_again[position] = 1
    reports: dict[str, DocumentReport] = {}
    placed = iter(layout.chunks)
    for chunk in loaded:
        assert chunk.segment.chunk is not None
        num_tokens = num_rerun = end = 0
        if chunk.source != "skipped":
            segment = next(placed)
            start, end = segment.start, segment.end
            num_tokens = len(segment.token_ids)
            num_rerun = ran_again.count(1, start, end)
            num_kept = num_tokens - num_rerun
            if end <= len(ready):
                num_rerun = 0
            elif chunk.source == "computed":
                written += num_tokens if chunk.is_stored else 0
                num_inexact += num_kept if chunk.has_entry and not chunk.is_exact else 0
            elif chunk.source == "not_loaded":
                num_rerun = min(num_tokens, end - len(ready))
                uses[end - num_rerun : end] = bytes([RECOMPUTED]) * num_rerun
            else:
                kept = EXACT if chunk.is_exact else FUSED
                uses[start:end] = (RECOMPUTED if again else kept for again in ran_again[start:end])
                by_source[chunk.source] += num_kept
                num_inexact += 0 if chunk.is_exact else num_kept
        source = "device" if num_tokens and end <= len(ready) else chunk.source
        name = chunk.segment.chunk.document_id
        before = reports.get(name)
        report = DocumentReport(
            name, num_tokens, int(num_tokens > 0), source, num_rerun, chunk.load_ms
        )
        if before is not None:
            report = replace(
                report,
                tokens=before.tokens + report.tokens,
                chunks=before.chunks + report.chunks,
                source=min(before.source, report.source, key=_SLOWEST_FIRST.index),
                recomputed_tokens=before.recomputed_tokens + report.recomputed_tokens,
                load_ms=before.load_ms + report.load_ms,
            )
        reports[name] = report
    if opening is not None and opening != "computed":
        by_source[opening] += layout.opening_end
        uses[: layout.opening_end] = bytes([EXACT]) * layout.opening_end
    if ready:
        by_source["device"] += len(ready)
        uses[: len(ready)] = ready.uses
        num_inexact += len(ready) - ready.num_exact
    use = PromptUse(layout, bytes(uses))
    account = PromptTokenAccount(
        prompt_tokens=layout.num_tokens,
        exact_prefix_tokens=use.count(EXACT),
        fused_tokens=use.count(FUSED),
        recomputed_tokens=use.count(RECOMPUTED),
        computed_tokens=use.count(COMPUTED),
        cached_tokens_by_source=dict(by_source),
        cache_write_tokens=written,
    )
    return Reuse(account, use, tuple(reports.values()), num_inexact)


def count_repeat(use: PromptUse, ready: ReadyTokens) -> Reuse:
    """Count a prompt that another one's pages hold to its end.

    Args:
        use: What became of its tokens the first time.
        ready: What they are now, all of them.
    """
    layout = use.layout
    loaded = [LoadedChunk(segment, "device", 0.0, has_entry=True) for segment in layout.chunks]
    return count_reuse(layout, loaded, None, set(), ready)
