"""The offline job's core: documents to entries, resumable by content.

There is nothing to check-point: a document that is stored and whose entries are there costs a
look-up. Kill the job at any moment and run it again.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
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
        tokens_per_second: Prefilled tokens over the time spent prefilling.
        failures: Items that failed so far.
    """

    item: str
    documents: int
    prefilled_chunks: int
    prefilled_tokens: int
    tokens_per_second: float
    failures: int


OnProgress = Callable[[PrecacheProgress], None]
NUM_WRITERS = 2
"""Chunks in flight: while one is written to disk the next is run through the model."""


class PrecacheRun:
    """One run over some items; memory does not grow with their number.

    Args:
        cache: Where documents go.
        on_progress: Told how far it is.
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
        self._statuses = {"created": 0, "updated": 0, "unchanged": 0}
        self._failures: list[ItemFailure] = []
        self._num_chunks = self._num_tokens = 0
        self._prefilled_chunks = self._prefilled_tokens = 0
        self._prefill_seconds = 0.0

    def run(self, items: Iterable[Item]) -> PrecacheSummary:
        """Cache every item; an item that fails is reported and the others go on.

        Raises:
            StoreError: The store failed (for example, it is full): going on would not help.
        """
        started = time.perf_counter()
        interrupted = False
        with ThreadPoolExecutor(NUM_WRITERS, thread_name_prefix="precache") as pool:
            for item in items:
                if self._should_stop():
                    interrupted = True
                    break
                self._take(item, pool)
        return PrecacheSummary(
            documents=sum(self._statuses.values()),
            created=self._statuses["created"],
            updated=self._statuses["updated"],
            unchanged=self._statuses["unchanged"],
            chunks=self._num_chunks,
            tokens=self._num_tokens,
            prefilled_chunks=self._prefilled_chunks,
            prefilled_tokens=self._prefilled_tokens,
            seconds=time.perf_counter() - started,
            tokens_per_second=self._rate(),
            failures=tuple(self._failures),
            interrupted=interrupted,
        )

    def _take(self, item: Item, pool: ThreadPoolExecutor) -> None:
        text: str | ItemFailure
        metadata: Metadata = {}
        if isinstance(item, ItemFailure):
            self._failures.append(item)
            self._report(item.item)
            return
        if isinstance(item, TextFile):
            text = item.read()
            if isinstance(text, ItemFailure):
                self._failures.append(text)
                self._report(text.item)
                return
        else:
            text, metadata = item.text, item.metadata
        began = time.perf_counter()

        def on_chunk(num_tokens: int) -> None:
            self._prefilled_chunks += 1
            self._prefilled_tokens += num_tokens
            self._report(item.document_id, time.perf_counter() - began)

        try:
            result = self._cache.ingest(
                item.document_id,
                text,
                metadata,
                text_format=item.text_format,
                map_chunks=pool.map,
                on_prefill=on_chunk,
            )
        except (StoreError, DrainingError):
            raise
        except ChunkCacheError as error:
            self._failures.append(ItemFailure(item.document_id, error.code, error.message))
        else:
            self._statuses[result.status] += 1
            self._num_chunks += result.num_chunks
            self._num_tokens += result.num_tokens
            if result.prefilled_chunks:
                self._prefill_seconds += time.perf_counter() - began
        self._report(item.document_id)

    def _rate(self, running_seconds: float = 0.0) -> float:
        seconds = self._prefill_seconds + running_seconds
        return self._prefilled_tokens / seconds if seconds and self._prefilled_tokens else 0.0

    def _report(self, item: str, running_seconds: float = 0.0) -> None:
        self._on_progress(
            PrecacheProgress(
                item=item,
                documents=sum(self._statuses.values()),
                prefilled_chunks=self._prefilled_chunks,
                prefilled_tokens=self._prefilled_tokens,
                tokens_per_second=self._rate(running_seconds),
                failures=len(self._failures),
            )
        )
