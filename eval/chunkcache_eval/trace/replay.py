"""A trace through the RAM tier itself, by policy and capacity. Runs no model.

Entries are real, but their tensors are a single zero seen many times: four bytes a token, keys and
values together.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from chunkcache.entry import Entry
from chunkcache.errors import InvalidValueError
from chunkcache.identity import ChunkKey, EntryIdentity, ModelDigest, TenantNamespace
from chunkcache.store.eviction.registry import make_eviction
from chunkcache.store.host import HostTier
from chunkcache_eval.trace.bounds import (
    distinct_tokens,
    optimal_reuse,
    prefix_reuse,
    total_tokens,
    unlimited_reuse,
)
from chunkcache_eval.trace.requests import TracedRequest, TracedSegment

_BYTES_PER_TOKEN = 4
_ZERO = torch.zeros((1, 1, 1, 1), dtype=torch.bfloat16)


@dataclass(frozen=True)
class ReplayRun:
    """One policy at one capacity.

    Attributes:
        policy: Its name.
        capacity: Share of the bytes of all distinct segments.
        token_reuse: Share of all prompt tokens that the tier held.
        evictions: Segments pushed out.
        rejections: Segments not let in.
    """

    policy: str
    capacity: float
    token_reuse: float
    evictions: int
    rejections: int


@dataclass(frozen=True)
class Optimum:
    """Reuse with the future known, at one capacity."""

    capacity: float
    token_reuse: float


@dataclass(frozen=True)
class TraceReport:
    """A trace under some policies. All reuse is a share of all prompt tokens.

    Attributes:
        num_requests: Requests replayed.
        num_tokens: Their prompt tokens.
        num_distinct_tokens: Tokens of all distinct segments: capacity 1.
        prefix_only: Reuse of prompt beginnings alone, without a limit.
        unlimited: Reuse wherever a segment stands, without a limit.
        optimum: By capacity.
        runs: By policy and capacity.
    """

    num_requests: int
    num_tokens: int
    num_distinct_tokens: int
    prefix_only: float
    unlimited: float
    optimum: tuple[Optimum, ...]
    runs: tuple[ReplayRun, ...]

    def to_dict(self) -> dict[str, Any]:
        """The command's JSON."""
        return asdict(self)


def replay_trace(
    requests: Sequence[TracedRequest],
    capacities: Sequence[float],
    policies: Sequence[str],
    progress: Callable[[str], None] = lambda line: None,
) -> TraceReport:
    """Replay a trace under each policy at each capacity.

    Args:
        requests: In the order of their arrival.
        capacities: Shares of the bytes of all distinct segments, over 0.
        policies: Names of eviction policies.
        progress: Told of each run as it ends.

    Raises:
        InvalidValueError: A capacity is not over 0, or there is no such policy.
    """
    num_tokens, num_distinct = total_tokens(requests), distinct_tokens(requests)
    sizes = {share: int(share * num_distinct) for share in capacities}
    for share, size in sizes.items():
        if size < 1:
            raise InvalidValueError(f"a capacity of {share:g} holds nothing", param="capacity")
    for policy in policies:
        make_eviction(policy, 1)
    runs: list[ReplayRun] = []
    for policy in policies:
        for share, size in sizes.items():
            run = _replay(requests, num_tokens, policy, share, size)
            runs.append(run)
            progress(f"{policy} at {share:.1%}: {run.token_reuse:.2%} of the tokens reused")
    return TraceReport(
        num_requests=len(requests),
        num_tokens=num_tokens,
        num_distinct_tokens=num_distinct,
        prefix_only=prefix_reuse(requests) / num_tokens,
        unlimited=unlimited_reuse(requests) / num_tokens,
        optimum=tuple(
            Optimum(share, optimal_reuse(requests, size) / num_tokens)
            for share, size in sizes.items()
        ),
        runs=tuple(runs),
    )


def _replay(
    requests: Sequence[TracedRequest], num_tokens: int, policy: str, share: float, size: int
) -> ReplayRun:
    capacity_bytes = size * _BYTES_PER_TOKEN
    tier = HostTier(capacity_bytes, make_eviction(policy, capacity_bytes))
    reused = 0
    for request in requests:
        leases = []
        for segment in request:
            lease = tier.get(_key(segment))
            if lease is None:
                lease = tier.put(_entry(segment))
            else:
                reused += segment.num_tokens
            leases.append(lease)
        for lease in leases:
            lease.release()
    tier.check_integrity()
    stats = tier.stats()
    return ReplayRun(policy, share, reused / num_tokens, stats.evictions, stats.rejections)


def _key(segment: TracedSegment) -> ChunkKey:
    return ChunkKey(segment.segment_id.encode())


def _entry(segment: TracedSegment) -> Entry:
    tensor = _ZERO.expand(1, segment.num_tokens, 1, 1)
    return Entry(_identity(segment.num_tokens), _key(segment), tensor, tensor)


@cache
def _identity(num_tokens: int) -> EntryIdentity:
    """One for all segments of a size; the tier goes by the key."""
    return EntryIdentity(
        ModelDigest(b""), TenantNamespace(b""), "alone", (), "raw", (0,) * num_tokens
    )
