"""The offline job's core: documents to entries, resumable by content.

There is nothing to check-point: a document that is stored and whose entries are there costs a
look-up. Kill the job at any moment and run it again.

With neighbours it has two phases. First every item is stored, without any model work; then
neighbours are chosen and recorded for chunks that have none, and entries computed, document by
document. A run that was killed goes on with the neighbours that it had recorded.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path

from chunkcache.documents import Document
from chunkcache.entry_window import MAX_TOKENS
from chunkcache.errors import (
    ChunkCacheError,
    DrainingError,
    ModelError,
    RequestCancelledError,
    StoreError,
)
from chunkcache.ingest import DocumentIngest
from chunkcache.neighbours import NeighbourFinder, NeighbourRecorder
from chunkcache.results import ItemFailure, PrecacheSummary
from chunkcache.store.page_cache import WrittenPages
from chunkcache.text_files import TextFile, TextItem, find_text_files


@dataclass(frozen=True)
class StoredDocument:
    """A document that is stored already; one of another tokenizer is cut again."""

    document_id: str


Item = TextItem | TextFile | StoredDocument | ItemFailure


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
        prepared_chunks: Chunks whose entries were looked for, and are there now.
        chunks_to_prepare: In the second phase, how many chunks it looks at; 0 in the first.
    """

    item: str
    documents: int
    prefilled_chunks: int
    prefilled_tokens: int
    tokens_per_second: float
    failures: int
    prepared_chunks: int = 0
    chunks_to_prepare: int = 0


OnProgress = Callable[[PrecacheProgress], None]
_PAGE_DOCUMENTS = 1_000
NUM_DOCUMENTS_IN_FLIGHT = 8
MIN_DOCUMENTS_IN_FLIGHT = 2
"""While one document's entries are written to disk, another's are run through the model."""
MAX_CHARACTERS_IN_FLIGHT = 4 * MAX_TOKENS
"""So many short documents are at hand that they fill packs, and no more than two long ones: what
ends a run waits for the documents at hand."""


@dataclass(frozen=True)
class _Job:
    """What is to be done for one document, and about how many characters of text it is for."""

    name: str
    num_characters: int
    do: Callable[[], None]


class _InFlight:
    """Jobs under way, the oldest first. Only for one thread.

    Args:
        max_jobs: How many may be.
    """

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._jobs: deque[tuple[_Job, Future[None]]] = deque()

    def begin(self, job: _Job, pool: ThreadPoolExecutor) -> None:
        """Begin a job once there is room; of two with one name, the later begins behind the other.

        Raises:
            Exception: Whatever a job before it raised.
        """
        while len(self._jobs) == self._max_jobs or self._is_full or self._has(job.name):
            self._wait_for_oldest()
        self._jobs.append((job, pool.submit(job.do)))

    def wait(self) -> None:
        """Wait for all jobs; raises as :meth:`begin` does."""
        while self._jobs:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        self._jobs.popleft()[1].result()

    def _has(self, name: str) -> bool:
        return any(job.name == name for job, _ in self._jobs)

    @property
    def _is_full(self) -> bool:
        num_characters = sum(job.num_characters for job, _ in self._jobs)
        is_much = num_characters >= MAX_CHARACTERS_IN_FLIGHT
        return is_much and len(self._jobs) >= MIN_DOCUMENTS_IN_FLIGHT


class PrecacheRun:
    """One run over some items. But for neighbours, memory does not grow with their number.

    Args:
        ingest: Where documents go.
        on_progress: Told how far it is, from the thread that calls :meth:`run` or a worker's,
            never from two at once. A ``RequestCancelledError`` that it raises ends the run at once:
            :meth:`run` raises it too, and what was finished is kept.
        should_stop: Asked before each document; True ends the run after what is finished.
    """

    def __init__(
        self,
        ingest: DocumentIngest,
        on_progress: OnProgress = lambda progress: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._ingest = ingest
        self._on_progress = on_progress
        self._should_stop = should_stop
        self._written = WrittenPages(ingest.runtime.env)
        self._lock = threading.Lock()
        self._statuses: Counter[str] = Counter()
        self._failures: list[tuple[int, ItemFailure]] = []
        self._num_chunks = self._num_tokens = 0
        self._prefilled_chunks = self._prefilled_tokens = self._prefill_rows = 0
        self._prepared_chunks = self._chunks_to_prepare = self._without_neighbours = 0
        self._not_kept = 0
        self._started = time.perf_counter()

    def run(self, items: Iterable[Item]) -> PrecacheSummary:
        """Cache every item; an item that fails is reported and the others go on.

        Raises:
            StoreError: The store failed (for example, it is full): going on would not help.
        """
        return self._summary(is_whole=self._do_each(self._take_each(items, prefills=True)))

    def run_with_neighbours(
        self,
        items: Iterable[Item],
        finder: NeighbourFinder,
        document_ids: Collection[str] | None = None,
    ) -> PrecacheSummary:
        """Store every item, then prepare documents behind their neighbours.

        Args:
            items: As in :meth:`run`.
            finder: Ranks chunks; first asked once every item is stored.
            document_ids: What to prepare; None is every document of the tenant, so that chunks
                which were met elsewhere first, or have lost a neighbour, are prepared as well.

        Raises:
            StoreError: As in :meth:`run`.
            ModelError: The finder does not work.
        """
        is_whole = self._do_each(self._take_each(items, prefills=False))
        if is_whole:
            recorder = NeighbourRecorder(self._ingest, finder)
            wanted = self._documents(document_ids)
            self._chunks_to_prepare = sum(wanted.values())
            characters = 4 * self._ingest.runtime.settings.chunk_tokens
            is_whole = self._do_each(
                _Job(name, num_chunks * characters, partial(self._prepare, place, name, recorder))
                for place, (name, num_chunks) in enumerate(wanted.items())
            )
        return self._summary(is_whole=is_whole)

    def _take_each(self, items: Iterable[Item], *, prefills: bool) -> Iterator[_Job]:
        for place, item in enumerate(items):
            name = item.item if isinstance(item, ItemFailure) else item.document_id
            yield _Job(name, _num_characters(item), partial(self._take, place, item, prefills))

    def _do_each(self, jobs: Iterable[_Job]) -> bool:
        """Do jobs on workers' threads; False if the run was stopped before the last."""
        disk, is_whole = self._ingest.runtime.disk, True
        # Under a budget, documents that come first keep their entries: not too many at once.
        max_jobs = NUM_DOCUMENTS_IN_FLIGHT if disk.budget is None else MIN_DOCUMENTS_IN_FLIGHT
        in_flight = _InFlight(max_jobs)
        with (
            disk.sparing(),
            ThreadPoolExecutor(max_jobs, thread_name_prefix="precache") as pool,
        ):
            for job in jobs:
                if self._should_stop():
                    is_whole = False
                    break
                in_flight.begin(job, pool)
            in_flight.wait()
        return is_whole

    def _take(self, place: int, item: Item, prefills: bool) -> None:
        """One item, on a worker's thread."""
        if isinstance(item, ItemFailure):
            self._fail(place, item)
            return
        if isinstance(item, TextFile):
            item = item.read()
            if isinstance(item, ItemFailure):
                self._fail(place, item)
                return
        with self._reporting(place, item.document_id):
            if isinstance(item, StoredDocument):
                stored = self._ingest.store_again(item.document_id)
            else:
                stored = self._ingest.store(
                    item.document_id, item.text, item.metadata, item.text_format
                )
            if prefills:
                self._prefill(stored.document)
            with self._lock:
                self._statuses[stored.status] += 1
                self._num_chunks += len(stored.document.chunks)
                self._num_tokens += stored.document.num_tokens
                self._report(item.document_id)

    def _prepare(self, place: int, document_id: str, recorder: NeighbourRecorder) -> None:
        """One document's neighbours and entries, on a worker's thread."""
        document = self._ingest.catalog.get(document_id)
        # What another tokenizer cut has to be stored anew before it can be prepared.
        tokenizer = self._ingest.runtime.model.tokenizer.digest
        if document is None or document.tokenizer != tokenizer:
            return
        with self._reporting(place, document_id):
            recorder.record(document)
            self._prefill(document)
            with self._lock:
                self._report(document_id)

    def _prefill(self, document: Document) -> None:
        def count(num_tokens: int, num_rows: int) -> None:
            self._written.drop()
            with self._lock:
                self._prepared_chunks += 1
                self._prefilled_chunks += 1
                self._prefilled_tokens += num_tokens
                self._prefill_rows += num_rows
                self._report(document.document_id)

        counts = self._ingest.prefill(document, count)
        with self._lock:
            self._prepared_chunks += len(document.chunks) - counts.prefilled_chunks
            self._without_neighbours += counts.without_neighbours
            self._not_kept += counts.not_kept_chunks

    def _documents(self, document_ids: Collection[str] | None) -> dict[str, int]:
        """Documents to prepare, with their chunks."""
        wanted: dict[str, int] = {}
        catalog = self._ingest.catalog
        page = catalog.list(limit=_PAGE_DOCUMENTS)
        while page:
            for info in page:
                if document_ids is None or info.document_id in document_ids:
                    wanted[info.document_id] = info.num_chunks
            page = catalog.list(after=page[-1].document_id, limit=_PAGE_DOCUMENTS)
        return wanted

    @contextmanager
    def _reporting(self, place: int, item: str) -> Iterator[None]:
        """Report what is wrong with one item; raise what no other item would fare better with."""
        try:
            yield
        except (StoreError, ModelError, DrainingError, RequestCancelledError):
            raise
        except ChunkCacheError as error:
            self._fail(place, ItemFailure(item, error.code, error.message))

    def _fail(self, place: int, failure: ItemFailure) -> None:
        """Note a failure, and where its item stood: several are at hand at once."""
        with self._lock:
            self._failures.append((place, failure))
            self._report(failure.item)

    def _rate(self) -> float:
        return self._prefilled_tokens / max(time.perf_counter() - self._started, 1e-9)

    def _report(self, item: str) -> None:
        self._on_progress(
            PrecacheProgress(
                item=item,
                documents=self._statuses.total(),
                prefilled_chunks=self._prefilled_chunks,
                prefilled_tokens=self._prefilled_tokens,
                tokens_per_second=self._rate(),
                failures=len(self._failures),
                prepared_chunks=self._prepared_chunks,
                chunks_to_prepare=self._chunks_to_prepare,
            )
        )

    def _summary(self, *, is_whole: bool) -> PrecacheSummary:
        return PrecacheSummary(
            documents=self._statuses.total(),
            created=self._statuses["created"],
            updated=self._statuses["updated"],
            unchanged=self._statuses["unchanged"],
            chunks=self._num_chunks,
            tokens=self._num_tokens,
            prefilled_chunks=self._prefilled_chunks,
            prefilled_tokens=self._prefilled_tokens,
            prefill_rows=self._prefill_rows,
            prefill_rows_per_token=self._prefill_rows / max(self._prefilled_tokens, 1),
            without_neighbours=self._without_neighbours,
            not_kept_chunks=self._not_kept,
            seconds=time.perf_counter() - self._started,
            tokens_per_second=self._rate(),
            failures=tuple(failure for _, failure in sorted(self._failures, key=itemgetter(0))),
            interrupted=not is_whole,
        )


def _num_characters(item: Item) -> int:
    """About how long a text is, as far as can be said without reading it."""
    if isinstance(item, TextItem):
        return len(item.text)
    if isinstance(item, TextFile):
        with suppress(OSError):
            return item.path.stat().st_size
    return 0


def expand_items(items: Iterable[Item | str | Path]) -> Iterator[Item]:
    """Replace paths by the files under them, in order."""
    for item in items:
        if isinstance(item, (str, Path)):
            yield from find_text_files([Path(item)])
        else:
            yield item
