"""What the reuse of a trace is held against: caches without a limit, and one that knows the future.

All figures are reused tokens.
"""

import heapq
from collections.abc import Sequence
from math import inf

from chunkcache_eval.trace.requests import TracedRequest


def total_tokens(requests: Sequence[TracedRequest]) -> int:
    """Tokens of all prompts."""
    return sum(segment.num_tokens for request in requests for segment in request)


def distinct_tokens(requests: Sequence[TracedRequest]) -> int:
    """Tokens of all distinct segments: what a cache without a limit ends up with."""
    return sum({s.segment_id: s.num_tokens for request in requests for s in request}.values())


def unlimited_reuse(requests: Sequence[TracedRequest]) -> int:
    """Reuse where every segment is kept for ever, and reused wherever it stands."""
    return total_tokens(requests) - distinct_tokens(requests)


def prefix_reuse(requests: Sequence[TracedRequest]) -> int:
    """Reuse where every prompt is kept for ever, and only its beginning is reused."""
    node_of: dict[tuple[int, str], int] = {}
    reused = 0
    for request in requests:
        node = 0
        for segment in request:
            step = (node, segment.segment_id)
            if step in node_of:
                reused += segment.num_tokens
            node = node_of.setdefault(step, len(node_of) + 1)
    return reused


def optimal_reuse(requests: Sequence[TracedRequest], capacity_tokens: int) -> int:
    """Reuse by a cache that knows the future: out goes what is used again last.

    What is not used again, or later than all that is held, is not let in. With segments of one
    size this is Belady's optimum (1966); with several it comes close.
    """
    uses = [(s.segment_id, s.num_tokens) for request in requests for s in request]
    next_uses: list[float] = [inf] * len(uses)
    seen_at: dict[str, int] = {}
    for i in range(len(uses) - 1, -1, -1):
        next_uses[i] = seen_at.get(uses[i][0], inf)
        seen_at[uses[i][0]] = i
    held: dict[str, tuple[int, float]] = {}
    farthest: list[tuple[float, str]] = []
    used = reused = 0
    for (segment_id, num_tokens), next_use in zip(uses, next_uses, strict=True):
        if segment_id in held:
            reused += num_tokens
            used -= held.pop(segment_id)[0]
        if next_use == inf or num_tokens > capacity_tokens:
            continue
        held[segment_id] = (num_tokens, next_use)
        used += num_tokens
        heapq.heappush(farthest, (-next_use, segment_id))
        while used > capacity_tokens:
            negative, other = heapq.heappop(farthest)
            if other in held and held[other][1] == -negative:
                used -= held.pop(other)[0]
    return reused
