"""Does what a store owes its remote: sends entries, removes deleted ones, looks whether it is back.

One thread per process; several processes of a store may do the same work twice, which changes
nothing. Nobody waits for it.

A removal is done at once and again after a time in which any sending that had begun before it must
have ended, in this process or another. Until then it stays on record, and the entry is not read.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from chunkcache.errors import StoreError
from chunkcache.identity import ChunkKey
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.remote import outbox
from chunkcache.store.remote.backend import RemoteFailure
from chunkcache.store.remote.breaker import CircuitBreaker
from chunkcache.store.remote.tier import RemoteTier
from chunkcache.store.transaction import Database

POLL_S: Final = 5.0
"""How often to look for what other processes have put on record."""
RETRY_S: Final = 1.0
_BATCH: Final = 32
_MAX_DAMAGED: Final = 1_000


@dataclass
class WorkCounts:
    """What was done.

    Attributes:
        sent: Entries written to the remote.
        sent_bytes: Their bytes.
        found: Entries that it had already, or that are too large for it.
        removed: Entries removed from it, damaged ones included.
        dropped: Entries that had left the disk before they were sent.
    """

    sent: int = 0
    sent_bytes: int = 0
    found: int = 0
    removed: int = 0
    dropped: int = 0


class RemoteWorker:
    """Works off a store's outbox.

    Args:
        env: The store. One that is open for reading alone is only probed for.
        tier: Where to.
        reads: The breaker of the calls that somebody waits for; here it is closed again.
        writes: The breaker of this worker's calls.
        settle_s: Seconds after which a removal is repeated and done with.
        clock: Unix seconds.
    """

    def __init__(
        self,
        env: StoreEnvironment,
        tier: RemoteTier,
        reads: CircuitBreaker,
        writes: CircuitBreaker,
        settle_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._env = env
        self._tier = tier
        self._reads = reads
        self._writes = writes
        self._settle_s = settle_s
        self._clock = clock
        self._after = b""
        self._removed_once: dict[ChunkKey, bytes] = {}
        self._damaged: dict[ChunkKey, None] = {}
        self._wanted = threading.Condition()
        self._is_woken = self._is_closing = False
        self._close_by = 0.0
        self._thread: threading.Thread | None = None
        self.counts = WorkCounts()

    def start(self) -> None:
        """Begin to work on a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="remote-sync", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There may be something to do."""
        with self._wanted:
            self._is_woken = True
            self._wanted.notify()

    def remove_damaged(self, key: ChunkKey) -> None:
        """Have an unusable object removed; forgotten where there are very many."""
        with self._wanted:
            if len(self._damaged) < _MAX_DAMAGED and not self._env.read_only:
                self._damaged[key] = None
        self.wake()

    def close(self, within_s: float) -> None:
        """Finish what can be finished in a time; the rest stays on record."""
        with self._wanted:
            self._is_closing, self._close_by = True, time.monotonic() + within_s
            self._wanted.notify()
        if self._thread is not None:
            self._thread.join(within_s)

    def work(self) -> bool:
        """Do a round; on the caller's thread.

        Returns:
            Whether there was something to do and none of it failed: then there may be more.
        """
        if not self._reads.is_closed and self._reads.wait_s() == 0:
            self._tier.answers()  # which closes the breaker, or makes its pause longer
        if self._env.read_only or self._writes.wait_s() > 0:
            return False
        did_remove, removals_are_done = self._remove()
        did_send, sending_is_done = self._send()
        return (did_remove or did_send) and removals_are_done and sending_is_done

    def _run(self) -> None:
        while True:
            try:
                has_more = self.work()
            except StoreError:
                # The store is closed, or full: what is on record stays there.
                has_more = False
            with self._wanted:
                if self._is_closing and (not has_more or time.monotonic() >= self._close_by):
                    return
                if not has_more and not self._is_woken and not self._is_closing:
                    self._wanted.wait(self._pause_s())
                self._is_woken = False

    def _pause_s(self) -> float:
        waits = [b.wait_s() for b in (self._reads, self._writes) if not b.is_closed]
        return max(RETRY_S / 10, min([POLL_S, *waits]))

    def _remove(self) -> tuple[bool, bool]:
        """Whether there were removals to do, and whether all of them succeeded."""
        with self._wanted:
            damaged = list(self._damaged)
        with self._env.read() as txn:
            owed = list(outbox.to_remove(txn))
        self._removed_once = {k: r for k, r, _ in owed if self._removed_once.get(k) == r}
        is_old = {k: abs(self._clock() - since) >= self._settle_s for k, _, since in owed}
        due = [(k, r) for k, r, _ in owed if is_old[k] or k not in self._removed_once]
        settled: list[tuple[ChunkKey, bytes]] = []
        is_well = True
        try:
            for key in damaged:
                self.counts.removed += self._tier.delete(key)
                with self._wanted:
                    self._damaged.pop(key, None)
            for key, record in due:
                self.counts.removed += self._tier.delete(key)
                self._removed_once[key] = record
                if is_old[key]:
                    settled.append((key, record))
        except RemoteFailure:
            is_well = False
        if settled:
            self._env.update(
                lambda txn: [outbox.settle_removed(txn, k, r) for k, r in settled], frees=True
            )
        return bool(damaged or due), is_well

    def _send(self) -> tuple[bool, bool]:
        """Whether there were entries to send, and whether all of them arrived."""
        with self._env.read() as txn:
            owed = list(islice(outbox.to_send(txn, self._after), _BATCH))
        if not owed and not self._after:
            return False, True
        # Round and round, so that one that always fails does not hold up the others.
        self._after = owed[-1][0] if len(owed) == _BATCH else b""
        settled: list[tuple[ChunkKey, bytes]] = []
        is_well = True
        try:
            for key, record in owed:
                self._send_one(key)
                settled.append((key, record))
        except RemoteFailure:
            is_well, self._after = False, owed[len(settled)][0]
        if settled:
            self._env.update(
                lambda txn: [outbox.settle_sent(txn, k, r) for k, r in settled], frees=True
            )
        return True, is_well

    def _send_one(self, key: ChunkKey) -> None:
        with self._env.read() as txn:
            value = txn.get(Database.ENTRIES, key)
            data = None if value is None else bytes(value)
        if data is None:
            self.counts.dropped += 1
        elif self._tier.put_encoded(key, data):
            self.counts.sent += 1
            self.counts.sent_bytes += len(data)
        else:
            self.counts.found += 1
