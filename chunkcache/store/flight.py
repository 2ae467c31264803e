"""A computation or a read of one entry that is under way, for those who wait for it."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chunkcache.entry import Entry
from chunkcache.identity import ChunkId, ChunkKey, EntryIdentity
from chunkcache.store.disk import Guard
from chunkcache.store.tier import MissReason, NotStored

Prefill = Callable[[], Entry]


@dataclass(frozen=True)
class Wanted:
    """What a look-up is for; as the arguments of :meth:`TierStack.load_or_prefill`."""

    identity: EntryIdentity
    prefill: Prefill | None = None
    guard: Guard | None = None
    traced: Sequence[ChunkId] = ()
    may_lend: bool = False


class Flight:
    """One computation or disk read under way; others who want the key wait for it."""

    def __init__(self, miss: MissReason) -> None:
        self.miss = miss
        self.owner = threading.get_ident()
        self.done = threading.Event()
        self.entry: Entry | None = None
        self.warning: NotStored | None = None
        self.error: BaseException | None = None
        self.is_dropped = False
        self.is_forgotten = False


class Flights:
    """What is under way. Not locked: its owner serialises the calls."""

    def __init__(self) -> None:
        self._flights: dict[ChunkKey, Flight] = {}
        self._beside: dict[ChunkKey, Flight] = {}

    def join(self, key: ChunkKey, miss: MissReason, *, waits: bool) -> tuple[Flight, bool]:
        """The flight of a key, and whether the caller leads it.

        Args:
            key: What is wanted.
            miss: Why it is not in RAM.
            waits: Whether the caller may follow another thread's flight; the one thread that may
                not leads another beside it.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = Flight(miss)
            return flight, True
        if waits:
            return flight, False
        assert key not in self._beside, "prefills run on one thread"
        flight = self._beside[key] = Flight(miss)
        return flight, True

    def end(self, key: ChunkKey, flight: Flight) -> None:
        """The flight is over."""
        for flights in (self._flights, self._beside):
            if flights.get(key) is flight:
                del flights[key]

    def of(self, key: ChunkKey) -> list[Flight]:
        """The flights of a key."""
        return [f for f in (self._flights.get(key), self._beside.get(key)) if f is not None]

    def all(self) -> list[Flight]:
        """Every flight."""
        return [*self._flights.values(), *self._beside.values()]
