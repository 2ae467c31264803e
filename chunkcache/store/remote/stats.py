"""What a remote tier has counted."""

from collections.abc import Mapping
from dataclasses import dataclass

from chunkcache.store.remote.backend import FailureKind
from chunkcache.store.remote.breaker import BreakerState
from chunkcache.store.tier import MissReason


@dataclass(frozen=True)
class RemoteStats:
    """A snapshot of a remote tier, as this process sees it.

    Attributes:
        address: Its URL without secrets.
        state: Whether it is asked: closed is well, open is left alone for a while.
        num_opened: How often it had to be left alone.
        hits: Entries that came from it.
        misses: Entries that did not, by reason.
        failures: Calls that failed, by kind.
        read_bytes: Bytes that came from it.
        sent: Entries written to it.
        sent_bytes: Their bytes.
        removed: Entries removed from it.
        dropped: Entries that had left the disk before they were sent.
        to_send: Entries that wait to be sent.
        to_remove: Removals that are not confirmed yet.
    """

    address: str
    state: BreakerState
    num_opened: int
    hits: int
    misses: Mapping[MissReason, int]
    failures: Mapping[FailureKind, int]
    read_bytes: int
    sent: int
    sent_bytes: int
    removed: int
    dropped: int
    to_send: int
    to_remove: int

    @property
    def is_reachable(self) -> bool:
        """Whether it answered when it was last asked."""
        return self.state is BreakerState.CLOSED
