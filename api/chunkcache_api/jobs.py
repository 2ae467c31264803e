"""Pre-caching jobs of one tenant: one at a time, beside questions, whoever is still connected.

A job is an ordinary pre-caching run: what it has finished is kept, and the same job asked for again
goes on from there. Jobs themselves live in memory and end with the server. Knows no HTTP.
"""

import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

import structlog

from chunkcache.chunk_cache import ChunkCache
from chunkcache.errors import (
    ChunkCacheError,
    DrainingError,
    QueueFullError,
    RequestCancelledError,
)
from chunkcache.failure_logs import traceback_text
from chunkcache.neighbours import NeighbourFinder
from chunkcache.precache import Item, PrecacheProgress, StoredDocument
from chunkcache.results import PrecacheSummary
from chunkcache.text_files import TextItem
from chunkcache_api.error_responses import error_body, internal_error
from chunkcache_api.errors import JobNotFoundError

NeighboursFactory = Callable[[ChunkCache], NeighbourFinder | None]
Status = Literal["queued", "running", "completed", "failed", "cancelled"]

MAX_UNFINISHED_JOBS: Final = 16
MAX_KEPT_JOBS: Final = 100
"""Jobs that have ended and are still told of."""
MAX_SHOWN_FAILURES: Final = 100
MAX_QUERY_SHARE: Final = 4
"""While questions are open, a job pauses behind a chunk for so many times the chunk's own time."""

_MAX_PAUSE_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.02
_PAGE_DOCUMENTS: Final = 1_000

_log = structlog.get_logger("chunkcache.api")


@dataclass
class Job:
    """One job. Its fields are changed under its queue's lock."""

    job_id: str
    make_items: Callable[[], Iterable[Item]]
    document_ids: Collection[str] | None
    num_documents: int
    created_at: float
    status: Status = "queued"
    started_at: float | None = None
    ended_at: float | None = None
    progress: PrecacheProgress | None = None
    summary: PrecacheSummary | None = None
    error: ChunkCacheError | None = None
    is_cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def has_ended(self) -> bool:
        """Whether nothing will come of it any more."""
        return self.status not in ("queued", "running")

    def body(self) -> dict[str, Any]:
        """What a client is told."""
        summary, progress = self.summary, self.progress
        failures = () if summary is None else summary.failures
        done = 0 if progress is None else progress.documents + progress.failures
        return {
            "id": self.job_id,
            "object": "chunkcache.job",
            "kind": "precache",
            "status": self.status,
            "created_at": self.created_at,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "progress": {
                "documents": self.num_documents,
                "done": self.num_documents if summary and not summary.interrupted else done,
                "prefilled_chunks": 0 if progress is None else progress.prefilled_chunks,
                "prefilled_tokens": 0 if progress is None else progress.prefilled_tokens,
                "tokens_per_second": 0.0 if progress is None else progress.tokens_per_second,
                "failed": 0 if progress is None else progress.failures,
            },
            "summary": None if summary is None else _summary_body(summary),
            "failures": [asdict(f) for f in failures[:MAX_SHOWN_FAILURES]],
            "error": None if self.error is None else error_body(self.error)["error"],
        }


class PrecacheJobs:
    """One tenant's jobs. Any thread may call any method.

    Args:
        cache: The tenant's documents.
        neighbours: Makes what finds neighbours, where the preparation has some.
    """

    def __init__(self, cache: ChunkCache, neighbours: NeighboursFactory | None = None) -> None:
        self._cache = cache
        self._neighbours = neighbours
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._waiting: deque[Job] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(
        self, items: Sequence[TextItem], document_ids: Collection[str] | None
    ) -> dict[str, Any]:
        """Have documents cached.

        Args:
            items: New documents.
            document_ids: Documents that are stored; None, and no items, is all of them.

        Raises:
            QueueFullError: Too many jobs have not ended yet.
            DrainingError: The server is stopping.
        """
        wanted = [*items, *(StoredDocument(d) for d in document_ids or ())]
        name, now = f"job_{secrets.token_hex(12)}", time.time()
        if document_ids is None and not items:
            num_documents = self._cache.catalog.count()
            job = Job(name, lambda: _all_documents(self._cache), None, num_documents, now)
        else:
            named = {item.document_id for item in wanted}
            job = Job(name, lambda: wanted, named, len(wanted), now)
        with self._lock:
            if self._is_closed:
                raise DrainingError("the server is stopping")
            if sum(not j.has_ended for j in self._jobs.values()) >= MAX_UNFINISHED_JOBS:
                raise QueueFullError(
                    f"{MAX_UNFINISHED_JOBS} jobs have not ended yet; try again later"
                )
            self._jobs[job.job_id] = job
            self._forget_old()
            self._waiting.append(job)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run_all, name="chunkcache-jobs", daemon=True
                )
                self._thread.start()
            return job.body()

    def list(self) -> "list[dict[str, Any]]":
        """Every job that is told of, the oldest first."""
        with self._lock:
            return [job.body() for job in self._jobs.values()]

    def get(self, job_id: str) -> dict[str, Any]:
        """One job.

        Raises:
            JobNotFoundError: There is none of that id, or it is not told of any more.
        """
        with self._lock:
            return self._require(job_id).body()

    def cancel(self, job_id: str) -> dict[str, Any]:
        """End a job behind the chunk that it is at; harmless after its end.

        Raises:
            JobNotFoundError: As in :meth:`get`.
        """
        with self._lock:
            job = self._require(job_id)
            job.is_cancelled.set()
            if job.status == "queued":
                self._waiting.remove(job)
                self._end(job, "cancelled")
            return job.body()

    def close(self) -> None:
        """Cancel every job and wait for the one that runs; refuse new ones; idempotent."""
        with self._lock:
            self._is_closed = True
            for job in self._jobs.values():
                job.is_cancelled.set()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run_all(self) -> None:
        """On the jobs' own thread, which ends when none is left."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                job = self._waiting.popleft()
                job.status, job.started_at = "running", time.time()
            self._run(job)

    def _run(self, job: Job) -> None:
        status: Status = "failed"
        try:
            summary = self._summary(job)
            job.summary = summary
            status = "cancelled" if summary.interrupted else "completed"
        except RequestCancelledError:
            status = "cancelled"
        except ChunkCacheError as error:
            _log.warning("job_failed", job=job.job_id, code=error.code, reason=error.message)
            job.error = error
        except Exception as error:  # the job fails, the others go on
            _log.error("job_failed", job=job.job_id, exception=traceback_text(error))
            job.error = internal_error()
        with self._lock:
            self._end(job, status)

    def _summary(self, job: Job) -> PrecacheSummary:
        """The run; again with the next model, if a reload came in between."""
        while True:
            _check(job)
            runtime = self._cache.runtime
            pace = _Pace(self._cache, job)
            try:
                return self._cache.precache(
                    job.make_items(),
                    neighbours=None if self._neighbours is None else self._neighbours(self._cache),
                    document_ids=job.document_ids,
                    on_progress=lambda progress, p=pace: self._note(job, progress, p),
                    should_stop=job.is_cancelled.is_set,
                )
            except DrainingError:
                if self._cache.runtime is runtime:
                    raise

    def _note(self, job: Job, progress: PrecacheProgress, pace: "_Pace") -> None:
        with self._lock:
            job.progress = progress
        pace.wait(progress)
        _check(job)

    def _end(self, job: Job, status: Status) -> None:
        job.status, job.ended_at = status, time.time()
        job.make_items = tuple

    def _require(self, job_id: str) -> Job:
        job = self._jobs.get(job_id)
        if job is None:
            raise JobNotFoundError(f"there is no job {job_id!r}", param="id")
        return job

    def _forget_old(self) -> None:
        ended = [name for name, job in self._jobs.items() if job.has_ended]
        for name in ended[: max(0, len(ended) - MAX_KEPT_JOBS)]:
            del self._jobs[name]


class _Pace:
    """Leaves the engine to questions: a job pauses behind each chunk while some are open.

    Args:
        cache: Whose engine.
        job: Whose cancellation ends a pause.
    """

    def __init__(self, cache: ChunkCache, job: Job) -> None:
        self._cache = cache
        self._job = job
        self._num_chunks = 0
        self._began_at = time.monotonic()

    def wait(self, progress: PrecacheProgress) -> None:
        """Behind a chunk, until no question is open, or the pause has been long enough."""
        if progress.prefilled_chunks == self._num_chunks:
            return
        self._num_chunks = progress.prefilled_chunks
        now = time.monotonic()
        until = now + min(MAX_QUERY_SHARE * (now - self._began_at), _MAX_PAUSE_SECONDS)
        engine = self._cache.runtime.engine
        while engine.num_open_requests and time.monotonic() < until:
            if self._job.is_cancelled.wait(_POLL_SECONDS):
                break
        self._began_at = time.monotonic()


def _check(job: Job) -> None:
    if job.is_cancelled.is_set():
        raise RequestCancelledError("the job was cancelled")


def _all_documents(cache: ChunkCache) -> Iterator[Item]:
    after: str | None = None
    while page := cache.list(after=after, limit=_PAGE_DOCUMENTS):
        yield from (StoredDocument(info.document_id) for info in page)
        after = page[-1].document_id


def _summary_body(summary: PrecacheSummary) -> dict[str, Any]:
    body = asdict(summary)
    body["failures"] = len(summary.failures)
    return body
