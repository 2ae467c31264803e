"""Prefills that several threads wait for, computed together: chunks behind one prefix, in packs.

Products of many rows are quicker than those of few. Knows no store: who asks keeps what it gets.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field

from chunkcache.codecs import Codec
from chunkcache.engine.engine import Engine
from chunkcache.entry import Entry
from chunkcache.identity import EntryIdentity
from chunkcache.model.prefill import IsolatedPrefill


@dataclass(frozen=True)
class Prefilled:
    """What came of a request.

    Attributes:
        entry: The entry.
        num_rows: Rows that were run for it; those of a prefix count for the first of its pack.
    """

    entry: Entry
    num_rows: int


@dataclass(frozen=True)
class _Wanted:
    identity: EntryIdentity
    future: "Future[Prefilled]" = field(default_factory=Future)


class PrefillPacks:
    """Packs what waits. Any thread but the engine's may ask.

    Args:
        engine: Runs them, a layer at a time, in turn with requests.
        prefill: Computes; used for nothing else.
        codec: Encodes keys and values.
        on_pack: Told of each pack's rows and of the seconds they took.
    """

    def __init__(
        self,
        engine: Engine,
        prefill: IsolatedPrefill,
        codec: Codec,
        on_pack: Callable[[int, float], None],
    ) -> None:
        self._engine = engine
        self._prefill = prefill
        self._codec = codec
        self._on_pack = on_pack
        self._lock = threading.Lock()
        self._waiting: deque[_Wanted] = deque()

    def request(self, identity: EntryIdentity) -> "Future[Prefilled]":
        """Have an entry computed, beside others if any wait.

        Raises:
            DrainingError: The engine is stopping.
        """
        wanted = _Wanted(identity)
        with self._lock:
            # One task for each request: those whose request an earlier one has taken find less.
            self._engine.call_steps(self._steps)
            self._waiting.append(wanted)
        return wanted.future

    def _steps(self) -> Generator[None, None, None]:
        with self._lock:
            waiting = [w for w in self._waiting if not w.future.done()]
            num_packed = self._prefill.num_packed([w.identity for w in waiting]) if waiting else 0
            pack = waiting[:num_packed]
            self._waiting = deque(waiting[num_packed:])
        pack = [w for w in pack if w.future.set_running_or_notify_cancel()]
        try:
            if pack:
                yield from self._run(pack)
        except Exception:
            # Whatever is wrong with one of them is not the others' affair.
            for wanted in pack:
                yield from self._run_alone(wanted)

    def _run_alone(self, wanted: _Wanted) -> Generator[None, None, None]:
        try:
            yield from self._run([wanted])
        except Exception as error:  # handed to whoever waits for the future
            wanted.future.set_exception(error)

    def _run(self, pack: list[_Wanted]) -> Generator[None, None, None]:
        num_rows_before, spent_s = self._prefill.num_rows, 0.0
        steps = self._prefill.steps([w.identity for w in pack], self._codec)
        while True:
            started = time.perf_counter()
            try:
                next(steps)
            except StopIteration as stop:
                entries: list[Entry] = stop.value
                break
            finally:
                spent_s += time.perf_counter() - started
            yield
        num_rows = self._prefill.num_rows - num_rows_before
        self._on_pack(num_rows, spent_s)
        num_shared = num_rows - sum(entry.num_tokens for entry in entries)
        for wanted, entry in zip(pack, entries, strict=True):
            wanted.future.set_result(Prefilled(entry, entry.num_tokens + num_shared))
            num_shared = 0
