"""The offline job's core: documents to entries, resumable by content.

There is nothing to check-point: a document that is stored and whose entries are there costs a
look-up. Kill the job at any moment and run it again.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chunkcache.documents import Metadata
from chunkcache.errors import (
    ChunkCacheError,
    DrainingError,
    StoreError,
)
from chunkcache.results import ItemFailure, PrecacheSummary
from chunkcache.splitting import TextFormat
from chunkcache.text_files import TextFile

if TYPE_CHECKING:
    from chunkcache.chunk_cache import ChunkCache


@dataclass(frozen=True)
class TextItem:
    """A document to cache, given as text."""

    document_id: str
    text: str
    metadata: Metadata = field(default_factory=dict)
    text_format: TextFormat = "text"


Item = TextItem | TextFile | ItemFailure


@dataclass(frozen=True)
class PrecacheProgress:
    """Told after every chunk and every document.

    Attributes:
        item: The document at hand.
        documents: Documents done.
        prefilled_chunks: Chunks run through the model so far.
        prefilled_tokens: Their tokens.
        tokens_per_second: Prefilled tokens over the time since the run began.
        failures: Items that failed so far.
    """

    item: str
    documents: int
    prefilled_chunks: int
    prefilled_tokens: int
    tokens_per_second: float
    failures: int


OnProgress = Callable[[PrecacheProgress], None]
NUM_DOCUMENTS_IN_FLIGHT = 2
"""While one document's entries are written to disk, another's are run through the model."""


class PrecacheRun:
    """One run over some items; memory does not grow with their number.

    Args:
        cache: Where documents go.
        on_progress: Told how far it is, from the thread that calls :meth:`run` or a worker's,
            never from two at once.
        should_stop: Asked before each item; True ends the run after what is finished.
    """

    def __init__(
        self,
        cache: "ChunkCache",
        on_progress: OnProgress = lambda progress: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._cache = cache
        self._on_progress = on_progress
        self._should_stop = should_stop
        self._lock = threading.Lock()
        self._statuses = {"created": 0, "updated": 0, "unchanged": 0}
        self._failures: list[ItemFailure] = []
        self._num_chunks = self._num_tokens = 0
        self._prefilled_chunks = self._prefilled_tokens = 0
        self._started = time.perf_counter()

    def run(self, items: Iterable[Item]) -> PrecacheSummary:
        """Cache every item; an item that fails is reported and the others go on.

        Raises:
            StoreError: The store failed (for example, it is full): going on would not help.
        """
        self._started = time.perf_counter()
        interrupted = False
        in_flight: deque[tuple[str, Future[None]]] = deque()
        with ThreadPoolExecutor(NUM_DOCUMENTS_IN_FLIGHT, thread_name_prefix="precache") as pool:
            for item in items:
                if self._should_stop():
                    interrupted = True
                    break
                name = item.item if isinstance(item, ItemFailure) else item.document_id
                # Of two items with one id the later one must be stored last.
                while len(in_flight) == NUM_DOCUMENTS_IN_FLIGHT or name in dict(in_flight):
                    in_flight.popleft()[1].result()
                in_flight.append((name, pool.submit(self._take, item)))
            while in_flight:
                in_flight.popleft()[1].result()
        return PrecacheSummary(
            documents=sum(self._statuses.values()),
            created=self._statuses["created"],
            updated=self._statuses["updated"],
            unchanged=self._statuses["unchanged"],
            chunks=self._num_chunks,
            tokens=self._num_tokens,
            prefilled_chunks=self._prefilled_chunks,
            prefilled_tokens=self._prefilled_tokens,
            seconds=time.perf_counter() - self._started,
            tokens_per_second=self._rate(),
            failures=tuple(self._failures),
            interrupted=interrupted,
        )

    def _take(self, item: Item) -> None:
        """One item, on a worker's thread."""
        if isinstance(item, ItemFailure):
            self._fail(item)
            return
        text: str | ItemFailure
        metadata: Metadata = {}
        if isinstance(item, TextFile):
            text = item.read()
            if isinstance(text, ItemFailure):
                self._fail(text)
                return
        else:
            text, metadata = item.text, item.metadata
        try:
            result = self._cache.ingest(
                item.document_id,
                text,
                metadata,
                text_format=item.text_format,
                on_prefill=lambda num_tokens: self._count_prefill(item.document_id, num_tokens),
            )
        except (StoreError, DrainingError):
            raise
        except ChunkCacheError as error:
            self._fail(ItemFailure(item.document_id, error.code, error.message))
            return
        with self._lock:
            self._statuses[result.status] += 1
            self._num_chunks += result.num_chunks
            self._num_tokens += result.num_tokens
            self._report(item.document_id)

    def _count_prefill(self, item: str, num_tokens: int) -> None:
        with self._lock:
            self._prefilled_chunks += 1
            self._prefilled_tokens += num_tokens
            self._report(item)

    def _fail(self, failure: ItemFailure) -> None:
        with self._lock:
            self._failures.append(failure)
            self._report(failure.item)

    def _rate(self) -> float:
        return self._prefilled_tokens / max(time.perf_counter() - self._started, 1e-9)

    def _report(self, item: str) -> None:
        self._on_progress(
            PrecacheProgress(
                item=item,
                documents=sum(self._statuses.values()),
                prefilled_chunks=self._prefilled_chunks,
                prefilled_tokens=self._prefilled_tokens,
                tokens_per_second=self._rate(),
                failures=len(self._failures),
            )
        )
