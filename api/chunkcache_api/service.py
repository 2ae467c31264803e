"""What the routes share: the model and the store once they are open, and whether they are.

Loading runs on a thread, so that the server answers ``/livez`` meanwhile. Knows no HTTP.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Final, Literal

import structlog
from anyio import CapacityLimiter
from opentelemetry.trace import NoOpTracer, Tracer

from chunkcache.chunk_cache import DEFAULT_TENANT, ChunkCache
from chunkcache.errors import (
    ChunkCacheError,
    DrainingError,
    InvalidValueError,
    ModelError,
    StoreError,
)
from chunkcache.failure_logs import traceback_text
from chunkcache.identity import digest_fields
from chunkcache.results import ReloadResult
from chunkcache.runtime import Runtime
from chunkcache_api.auth.access import Principal
from chunkcache_api.errors import ModelLoadingError, ReloadFailedError
from chunkcache_api.jobs import NeighboursFactory, PrecacheJobs
from chunkcache_api.request_log import RequestLog
from chunkcache_api.retrieval import Retriever, RetrieverFactory
from chunkcache_api.workers import Claim, WorkerPool

RuntimeFactory = Callable[[], Runtime]
State = Literal["loading", "ready", "failed", "closing"]

_VERSION: Final = version("chunkcache")
NUM_QUICK_THREADS: Final = 8
NUM_PREFILL_THREADS: Final = 4
NUM_SEARCH_THREADS: Final = 4
MAX_TENANT_SHARE: Final = 0.75
"""Of the places for questions: the rest is left to other tenants."""

_log = structlog.get_logger("chunkcache.api")


@dataclass(frozen=True)
class Service:
    """An open runtime and what stands around it, as one tenant sees it.

    Attributes:
        cache: The tenant's documents.
        retriever: Finds its documents for a question, where one is configured.
        model_name: The served model's name.
        requests: An account of the tenant's latest requests.
        jobs: The tenant's pre-caching jobs.
        workers: Threads for questions, of all tenants, at most as many as the engine takes requests.
        quick_threads: Threads for looking at documents and deleting them.
        search_threads: Threads for searches; one after a change of the documents embeds what is new.
        prefill_threads: Threads for storing documents, which waits for the model.
        claims: Bounds on the questions in flight of those on whose behalf a request comes.
        loaded_at: Unix seconds.
        tracer: Makes the spans of requests.
    """

    cache: ChunkCache
    retriever: Retriever | None
    model_name: str
    requests: RequestLog
    jobs: PrecacheJobs
    workers: WorkerPool
    quick_threads: CapacityLimiter = field(
        default_factory=lambda: CapacityLimiter(NUM_QUICK_THREADS)
    )
    prefill_threads: CapacityLimiter = field(
        default_factory=lambda: CapacityLimiter(NUM_PREFILL_THREADS)
    )
    search_threads: CapacityLimiter = field(
        default_factory=lambda: CapacityLimiter(NUM_SEARCH_THREADS)
    )
    claims: tuple[Claim, ...] = ()
    loaded_at: float = field(default_factory=time.time)
    tracer: Tracer = field(default_factory=NoOpTracer)

    @property
    def system_fingerprint(self) -> str:
        """Names all that answers depend on now, beside the request and the documents."""
        return system_fingerprint(self.cache.runtime)

    @classmethod
    def over(
        cls,
        runtime: Runtime,
        retriever_factory: RetrieverFactory | None,
        tracer: Tracer,
        neighbours_factory: NeighboursFactory | None = None,
    ) -> "Service":
        """A service over an open runtime.

        A question occupies one request of the engine at a time, so as many workers as the engine
        takes requests mean that nothing already begun is refused for want of room.
        """
        settings = runtime.settings
        cache = ChunkCache(runtime)
        return cls(
            cache=cache,
            retriever=None if retriever_factory is None else retriever_factory(cache),
            model_name=served_model_name(settings.model),
            requests=RequestLog(settings.request_log_size),
            jobs=PrecacheJobs(cache, neighbours_factory),
            workers=WorkerPool(settings.max_queued_requests + settings.decode_tile_rows),
            tracer=tracer,
        )

    def of_tenant(
        self,
        tenant: str,
        retriever_factory: RetrieverFactory | None,
        neighbours_factory: NeighboursFactory | None = None,
    ) -> "Service":
        """The same runtime as another tenant sees it: nothing of one is another's.

        It has threads for documents and searches of its own, so that no tenant's uploads, or the
        embedding of them, keep another waiting.
        """
        cache = ChunkCache(self.cache.runtime, tenant)
        return replace(
            self,
            cache=cache,
            retriever=None if retriever_factory is None else retriever_factory(cache),
            requests=RequestLog(cache.runtime.settings.request_log_size),
            jobs=PrecacheJobs(cache, neighbours_factory),
            quick_threads=CapacityLimiter(NUM_QUICK_THREADS),
            prefill_threads=CapacityLimiter(NUM_PREFILL_THREADS),
            search_threads=CapacityLimiter(NUM_SEARCH_THREADS),
        )

    def for_principal(self, principal: Principal) -> "Service":
        """With bounds on what one key, and its tenant, may have in flight."""
        if principal.key_id is None:
            return self
        settings = self.cache.runtime.settings
        num_workers = settings.max_queued_requests + settings.decode_tile_rows
        return replace(
            self,
            claims=(
                Claim(f"key:{principal.key_id}", settings.max_requests_per_key),
                Claim(f"tenant:{principal.tenant}", max(1, int(num_workers * MAX_TENANT_SHARE))),
            ),
        )


class ServiceState:
    """Opens the service, hands it out while it is open, closes it.

    Args:
        source: An open runtime, which stays its owner's; or what opens one, which is closed here.
        retriever_factory: Builds the retriever.
        on_load_failure: Told why opening failed, on the loading thread.
        tracer: Makes the spans of requests.
        neighbours_factory: Makes what finds neighbours for jobs.
    """

    def __init__(
        self,
        source: Runtime | RuntimeFactory,
        retriever_factory: RetrieverFactory | None,
        on_load_failure: Callable[[BaseException], None],
        tracer: Tracer,
        neighbours_factory: NeighboursFactory | None = None,
    ) -> None:
        self._source = source
        self._retriever_factory = retriever_factory
        self._on_load_failure = on_load_failure
        self._tracer = tracer
        self._neighbours_factory = neighbours_factory
        self._lock = threading.Lock()
        self._tenants_lock = threading.Lock()
        self._state: State = "loading"
        self._service: Service | None = None
        self._by_tenant: dict[str, Service] = {}
        self._failure: BaseException | None = None

    def start(self) -> None:
        """Begin to open, on a thread; returns at once."""
        threading.Thread(target=self.open, name="chunkcache-load", daemon=True).start()

    def open(self) -> None:
        """Open on the caller's thread. What fails is told by :meth:`require`, not raised."""
        try:
            runtime = self._source if isinstance(self._source, Runtime) else self._source()
        except BaseException as error:  # reported, and every request says so from now on
            self._fail(error)
            return
        try:
            service = Service.over(
                runtime, self._retriever_factory, self._tracer, self._neighbours_factory
            )
        except BaseException as error:  # as above
            self._close_runtime(runtime)
            self._fail(error)
            return
        with self._lock:
            is_wanted = self._state == "loading"
            if is_wanted:
                self._service, self._state = service, "ready"
        if not is_wanted:
            self._close_runtime(runtime)

    def close(self) -> None:
        """End every question, finish what the engine accepted, close what was opened here.

        While the model is still being loaded this returns at once; the loading thread then closes
        what it has opened.
        """
        with self._lock:
            self._state = "closing"
            service, self._service = self._service, None
        if service is not None:
            service.workers.close()
            with self._tenants_lock:
                tenants = list(self._by_tenant.values())
            for each in (service, *tenants):
                each.jobs.close()
            self._close_runtime(service.cache.runtime)

    @property
    def open_service(self) -> Service | None:
        """The service, while it is open."""
        with self._lock:
            return self._service

    def require(self) -> Service:
        """The open service.

        Raises:
            ModelLoadingError: Not yet.
            DrainingError: Not any more.
            ModelError: The model could not be loaded.
            StoreError: The store could not be opened.
        """
        with self._lock:
            state, service, failure = self._state, self._service, self._failure
        if service is not None:
            return service
        if state == "loading":
            raise ModelLoadingError("the model is being loaded")
        if state == "closing":
            raise DrainingError("the server is stopping")
        kind = type(failure) if isinstance(failure, ModelError | StoreError) else ModelError
        raise kind("the service could not be opened")

    def reload(self) -> ReloadResult:
        """Load the served model again; on the caller's thread, and it takes as long as loading.

        Raises:
            ReloadFailedError: The new model cannot serve; the old one does.
            ReloadInProgressError: Another reload is under way.
            ChunkCacheError: As for :meth:`require`.
        """
        cache = self.require().cache
        try:
            result = cache.reload_model(lambda line: _log.info("reloading", step=line))
        except (ModelError, InvalidValueError) as error:
            _log.error("reload_failed", code=error.code, reason=error.message)
            raise ReloadFailedError(
                f"the model could not be loaded again ({error.code}); the one that was loaded "
                "before goes on serving; the server's log says why"
            ) from error
        _log.info("reloaded", changed=result.changed, model=result.model, digest=result.digest)
        return result

    def require_for(self, principal: Principal) -> Service:
        """The open service as one on whose behalf a request comes sees it. Errors likewise."""
        service, tenant = self.require(), principal.tenant
        if tenant != DEFAULT_TENANT:
            with self._tenants_lock:
                if tenant not in self._by_tenant:
                    self._by_tenant[tenant] = service.of_tenant(
                        tenant, self._retriever_factory, self._neighbours_factory
                    )
                service = self._by_tenant[tenant]
        return service.for_principal(principal)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = error
            if self._state == "loading":
                self._state = "failed"
        details = {} if isinstance(error, ChunkCacheError) else {"exception": traceback_text(error)}
        _log.error("load_failed", reason=str(error), **details)
        self._on_load_failure(error)

    def _close_runtime(self, runtime: Runtime) -> None:
        if not isinstance(self._source, Runtime):
            runtime.close()


def system_fingerprint(runtime: Runtime) -> str:
    """Changes with whatever may change an answer's bits: model, build, and how KV are kept."""
    fields = [
        ("version", _VERSION),
        ("model", runtime.gate.fingerprint),
        ("answers", runtime.model.answers_digest()),
        ("system", runtime.system),
        ("preparation", str(runtime.preparation)),
        ("codec", runtime.codec.name),
        ("tile_rows", runtime.settings.decode_tile_rows),
    ]
    return f"fp_{digest_fields('system', fields).hex()[:16]}"


def served_model_name(model: str) -> str:
    """The name that clients see: a path's last part without ``.gguf``, or the name as it is."""
    path = Path(model).expanduser()
    if path.is_absolute() or path.exists():
        return path.name.removesuffix(".gguf") or "model"
    return model
