"""Many entries at once: as many under way as fill packs, and no more tokens than memory is for.

Knows neither documents nor how an entry is found or computed.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from chunkcache.errors import DrainingError
from chunkcache.identity import EntryIdentity
from chunkcache.model.prefill import MAX_PACK_ROWS

MAX_THREADS: Final = 16
MAX_TOKENS: Final = 2 * MAX_PACK_ROWS
"""While one pack is computed, another waits and a third is written."""

Result = TypeVar("Result")


class EntryWindow:
    """Does something for many entries, several at a time. Close it when done.

    Several threads may use it: they share one bound.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="entries")
        self._free_tokens = MAX_TOKENS
        self._changed = threading.Condition()

    def each(
        self, identities: Iterable[EntryIdentity], work: Callable[[EntryIdentity], Result]
    ) -> Generator[Result, None, None]:
        """Results in the order of the entries. The first failure is raised.

        When it ends, early or not, nothing is under way any more: close it if it is left early.

        Args:
            identities: Whose entries; asked for one by one, as room comes.
            work: Called on other threads.

        Raises:
            DrainingError: The window is closed.
        """
        under_way: deque[Future[Result]] = deque()
        try:
            for identity in identities:
                under_way.append(self._begin(identity, work))
                while under_way and under_way[0].done():
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
            for future in under_way:
                if not future.cancelled():
                    future.exception()

    def close(self) -> None:
        """End the threads, once they have nothing to do."""
        self._pool.shutdown()

    def _begin(
        self, identity: EntryIdentity, work: Callable[[EntryIdentity], Result]
    ) -> Future[Result]:
        with self._changed:
            self._changed.wait_for(lambda: self._free_tokens >= _charged(identity))
            self._free_tokens -= _charged(identity)
        try:
            future = self._pool.submit(work, identity)
        except RuntimeError as error:  # what the library says of a pool that was shut down
            self._give_back(identity)
            raise DrainingError("no more entries are computed for this model") from error
        future.add_done_callback(lambda _: self._give_back(identity))
        return future

    def _give_back(self, identity: EntryIdentity) -> None:
        with self._changed:
            self._free_tokens += _charged(identity)
            self._changed.notify_all()


def _charged(identity: EntryIdentity) -> int:
    """Tokens that an entry counts for; the largest one alone fills the window."""
    return min(len(identity.token_ids), MAX_TOKENS)
