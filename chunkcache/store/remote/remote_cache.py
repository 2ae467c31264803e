"""The remote tier as the tier stack uses it: read when it pays and may be, written behind.

Knows when an entry may be read from the remote, and what comes of it. Doesn't know who waits.
"""

import threading
import time
from collections import Counter
from typing import Final

from chunkcache.entry import Entry
from chunkcache.identity import ChunkKey, EntryIdentity, ModelDigest
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.load_speed import LoadSpeed
from chunkcache.store.remote import outbox
from chunkcache.store.remote.calls import RemoteCalls
from chunkcache.store.remote.stats import RemoteStats
from chunkcache.store.remote.tier import RemoteTier
from chunkcache.store.remote.worker import RemoteWorker
from chunkcache.store.tier import MissReason

CLOSE_S: Final = 10.0
"""Seconds that closing may take to send and remove what is owed."""


class RemoteCache:
    """A remote behind a store.

    Args:
        env: The store, which keeps on record what the remote is owed.
        shown: The remote's URL without secrets.
        tier: The remote.
        reads: Calls that somebody waits for.
        writes: Calls that nobody waits for.
        worker: Sends and removes.
    """

    def __init__(
        self,
        env: StoreEnvironment,
        shown: str,
        tier: RemoteTier,
        reads: RemoteCalls,
        writes: RemoteCalls,
        worker: RemoteWorker,
    ) -> None:
        self._env = env
        self._shown = shown
        self._tier = tier
        self._reads = reads
        self._writes = writes
        self._worker = worker
        self._speed: LoadSpeed | None = None
        self._lock = threading.Lock()
        self._hits = self._read_bytes = 0
        self._misses: Counter[MissReason] = Counter()
        self._bytes_per_token: dict[tuple[ModelDigest, str], float] = {}

    def read(self, identity: EntryIdentity, *, may_prefill: bool) -> Entry | MissReason:
        """Fetch an entry, within the time that is set for it.

        Args:
            identity: What is wanted. One for a loose text is never asked for: the remote holds
                what is in documents.
            may_prefill: Whether it can be computed instead, if that is quicker.

        Returns:
            The entry, which nothing aliases, or why there is none. One that was not asked for,
            because it is computed sooner, counts as absent: nobody knows whether it is there.

        Raises:
            StoreError: The store is closed.
        """
        if identity.is_loose:
            return MissReason.ABSENT
        found = self._read(identity, may_prefill=may_prefill)
        with self._lock:
            if isinstance(found, MissReason):
                self._misses[found] += 1
            else:
                self._hits += 1
        return MissReason.ABSENT if found is MissReason.SLOWER_THAN_PREFILL else found

    def wake(self) -> None:
        """Something may have been put on record for the remote."""
        self._worker.wake()

    def stats(self) -> RemoteStats:
        """A snapshot.

        Raises:
            StoreError: The store is closed.
        """
        with self._env.read() as txn:
            to_send, to_remove = outbox.count_owed(txn)
        counts = self._worker.counts
        with self._lock:
            return RemoteStats(
                address=self._shown,
                state=self._reads.breaker.state,
                num_opened=self._reads.breaker.num_opened,
                hits=self._hits,
                misses=dict(self._misses),
                failures=dict(Counter(self._reads.failures()) + Counter(self._writes.failures())),
                read_bytes=self._read_bytes,
                sent=counts.sent,
                sent_bytes=counts.sent_bytes,
                removed=counts.removed,
                dropped=counts.dropped,
                to_send=to_send,
                to_remove=to_remove,
            )

    def check(self) -> bool:
        """Ask the remote for something now; says whether it answered."""
        return self._tier.answers()

    def start(self, speed: LoadSpeed | None = None) -> None:
        """Begin to send and remove.

        Args:
            speed: Knows when computing an entry anew is quicker than fetching it; None always
                fetches.
        """
        self._speed = speed
        self._worker.start()

    def close(self, within_s: float = CLOSE_S) -> None:
        """Send and remove what can be in a time, then let go; the rest stays on record."""
        self._worker.close(within_s)
        self._reads.close()
        self._writes.close()

    def _read(self, identity: EntryIdentity, *, may_prefill: bool) -> Entry | MissReason:
        key = identity.key()
        if self._is_to_be_removed(key):
            return MissReason.ABSENT
        if not self._reads.breaker.is_closed:
            # Whether it is back is for the worker to find out: nobody waits for that.
            return MissReason.REMOTE_UNAVAILABLE
        num_bytes = self._expected_bytes(identity)
        if self._speed is not None and may_prefill and num_bytes:
            num_rows = identity.num_prefill_rows
            if not self._speed.should_load(num_bytes, num_rows, tier="remote"):
                return MissReason.SLOWER_THAN_PREFILL
        started = time.perf_counter()
        found, num_bytes = self._tier.read(identity)
        spent_s = time.perf_counter() - started
        with self._lock:
            self._read_bytes += num_bytes
        if isinstance(found, MissReason):
            return found
        if self._is_to_be_removed(key):
            return MissReason.ABSENT  # deleted while it came
        with self._lock:
            self._bytes_per_token[identity.model, identity.codec] = num_bytes / found.num_tokens
        if self._speed is not None:
            self._speed.note_load(num_bytes, spent_s, tier="remote")
        return found

    def _is_to_be_removed(self, key: ChunkKey) -> bool:
        with self._env.read() as txn:
            return outbox.is_to_be_removed(txn, key)

    def _expected_bytes(self, identity: EntryIdentity) -> int:
        """What an entry of that size took before; 0 where none came yet."""
        with self._lock:
            per_token = self._bytes_per_token.get((identity.model, identity.codec), 0.0)
        return round(per_token * len(identity.token_ids))
