"""``ChunkCache``: one tenant's documents, cached and asked. The library's front door."""

import gc
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from chunkcache.catalog import Catalog
from chunkcache.catalog_values import DocumentInfo
from chunkcache.documents import Document, Metadata, UploadedFile, expiry_time
from chunkcache.errors import DocumentNotFoundError, DrainingError, InvalidValueError
from chunkcache.fusion.plan import FusionPlan
from chunkcache.neighbours import NeighbourFinder
from chunkcache.pinning import PinResult
from chunkcache.planning import AskOptions, ChatTurn, ContextRef
from chunkcache.precache import Item, OnProgress, PrecacheRun, expand_items
from chunkcache.precache_estimate import PrecacheEstimate, estimate_precache
from chunkcache.results import Answer, IngestResult, PrecacheSummary, ReloadResult, RemovalResult
from chunkcache.runtime import Progress, Runtime
from chunkcache.serving_model import ServingModel
from chunkcache.settings import load_settings
from chunkcache.splitting import TextFormat
from chunkcache.streaming import StreamingAnswer

DEFAULT_TENANT = "default"

ResultT = TypeVar("ResultT")


class ChunkCache:
    """One tenant's documents over a :class:`~chunkcache.runtime.Runtime`.

    Example::

        with ChunkCache.open(store="my.store") as cache:
            cache.put("handbook", text)
            print(cache.answer("What is the PIN?", ["handbook"]).text)

    Attributes:
        catalog: The tenant's documents.
    """

    def __init__(
        self, runtime: Runtime, tenant: str = DEFAULT_TENANT, *, owns_runtime: bool = False
    ) -> None:
        self.catalog = Catalog(runtime.env, runtime.namespace(tenant), quota=runtime.quota)
        self._serving = ServingModel.over(runtime.current, self.catalog)
        self._owns_runtime = owns_runtime
        runtime.succession.add_follower(self)

    @property
    def runtime(self) -> Runtime:
        """Model, store and engine. Another object once the model was reloaded."""
        return self._current().runtime

    @classmethod
    def open(
        cls,
        store: str | Path | None = None,
        model: str | None = None,
        *,
        progress: Progress = lambda line: None,
        **settings: Any,
    ) -> "ChunkCache":
        """Open a store with a model.

        Args:
            store: Directory of the store; made if it is not there.
            model: ``demo``, a directory, a ``.gguf`` file or a hub id.
            progress: Told what is going on, one line at a time.
            **settings: Any other field of :class:`~chunkcache.settings.Settings`.

        Raises:
            ModelError: The model cannot be loaded, is not supported, or fails the gate.
            StoreError: The store cannot be used.
            InvalidValueError: A setting is unknown or out of range.
        """
        loaded = load_settings(store=store, model=model, **settings)
        return cls(Runtime.open(loaded, progress), owns_runtime=True)

    def close(self) -> None:
        """Close the runtime, if this object opened it; idempotent."""
        if self._owns_runtime:
            self.runtime.close()

    def __enter__(self) -> "ChunkCache":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def put(
        self,
        document_id: str,
        text: str,
        metadata: Metadata | None = None,
        *,
        text_format: TextFormat = "text",
        expires_at: float | None = None,
        ttl_seconds: float | None = None,
        file: UploadedFile | None = None,
    ) -> IngestResult:
        """Store a document and prefill its chunks; when this returns, questions hit.

        Putting the same text again changes nothing and costs a look-up. Under a preparation with
        neighbours, chunks of which none are recorded are prepared behind the preamble until
        :meth:`precache` runs.

        Args:
            document_id: Its name, opaque to us.
            text: What it says.
            metadata: A JSON object, returned as given.
            text_format: How to cut it.
            expires_at: Unix seconds from which on it is as if it had been deleted. It lies in the
                store until it is collected (``chunkcache store gc``). Like the metadata, it is
                replaced by each put: none means that the document does not expire.
            ttl_seconds: The same, counted from now.
            file: The file that it came in; told again, and used for nothing.

        Raises:
            InvalidValueError: Id, text, metadata or expiry are not acceptable.
            StoreReadOnlyError: The store was opened for reading alone.
            EmptyDocumentError: Nothing to cache in the text.
            QuotaExceededError: The tenant's quota is used up; nothing was kept.
            StoreFullError: No room. Text that was stored before the store was full is kept; the
                chunks that have no entry are computed when they are asked for.
        """
        expiry = expiry_time(expires_at, ttl_seconds, time.time())
        return self.on_current(
            lambda model: model.ingest.ingest(
                document_id, text, metadata or {}, text_format, expiry, file
            )
        )

    def get(self, document_id: str) -> Document:
        """A document.

        Raises:
            DocumentNotFoundError: There is none of that id.
        """
        return self.catalog.require(document_id)

    def list(self, *, after: str | None = None, limit: int = 100) -> "list[DocumentInfo]":
        """Documents in order of their ids, behind ``after``."""
        return self.catalog.list(after=after, limit=limit)

    def delete(self, document_id: str) -> RemovalResult:
        """Remove a document from every tier, and every entry prepared behind one of its chunks.

        Chunks that other documents hold too stay.

        Raises:
            DocumentNotFoundError: There is none of that id.
        """
        result = self.catalog.delete(document_id)
        removed = result.removed
        self.runtime.follow_removals()
        if not result.existed:
            raise DocumentNotFoundError(
                f"there is no document {document_id!r}", param="document_id"
            )
        return RemovalResult(len(removed.entry_keys), len(removed.unprepared_chunk_ids))

    def pin(self, document_ids: Iterable[str], *, ttl_s: float) -> PinResult:
        """Keep documents' chunks in RAM for a time, whatever else comes. Missing entries are computed.

        Pinning again lengthens. Deleting a document ends its pins, reloading the model all of them.

        Args:
            document_ids: The documents.
            ttl_s: Seconds from now, over 0.

        Raises:
            DocumentNotFoundError: A document is not there; nothing is pinned.
            PinLimitError: They do not fit into the share of RAM that pins may hold; nothing that
                was not pinned before is pinned.
            InvalidValueError: ``ttl_s`` is not over 0.
        """
        wanted = list(document_ids)
        return self.on_current(lambda model: model.pins.pin(wanted, ttl_s))

    def unpin(self, document_ids: Iterable[str]) -> int:
        """End the pins of documents' chunks; says of how many chunks.

        Raises:
            DocumentNotFoundError: A document is not there.
        """
        return self._current().pins.unpin(document_ids)

    def next_use(self, document_ids: Iterable[str], *, in_s: float) -> int:
        """Say when documents will be asked about next, for workflows whose steps are known.

        Until then RAM values their chunks by that use instead of by what it has learned; unlike a
        pin it yields to what is needed sooner.

        Args:
            document_ids: The documents.
            in_s: Seconds from now, 0 or more.

        Returns:
            How many of their chunks RAM holds now.

        Raises:
            DocumentNotFoundError: A document is not there.
            InvalidValueError: ``in_s`` is less than 0.
        """
        wanted = list(document_ids)
        return self.on_current(lambda model: model.pins.next_use(wanted, in_s))

    def precache(
        self,
        items: Iterable[Item | str | Path] = (),
        *,
        neighbours: NeighbourFinder | None = None,
        document_ids: Collection[str] | None = None,
        on_progress: OnProgress = lambda progress: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> PrecacheSummary:
        """Cache a corpus: paths of files and folders, or items.

        Under a preparation with neighbours the items are stored first; then every document of the
        tenant is prepared. Without any items, this prepares what was put before, and what has lost
        a neighbour since.

        Args:
            items: Paths, :class:`~chunkcache.precache.TextItem` values, or both.
            neighbours: Finds neighbours, for a preparation that has some; it is not used otherwise.
            document_ids: Prepare these documents alone.
            on_progress: Told how far it is.
            should_stop: Asked before each document; True ends the run cleanly.

        Raises:
            InvalidValueError: The preparation has neighbours, and nothing is given to find them.
            ModelError: The finder does not work.
            StoreError: The store failed; what was finished is kept.
            DrainingError: The model was reloaded meanwhile, or the runtime closed; what was
                finished is kept.
        """
        serving = self._current()
        run = PrecacheRun(serving.ingest, on_progress, should_stop)
        preparation = serving.runtime.preparation
        if preparation.kind != "neighbours":
            return run.run(expand_items(items))
        if neighbours is None:
            raise InvalidValueError(
                f"preparation {preparation} needs something that finds neighbours",
                param="neighbours",
            )
        return run.run_with_neighbours(expand_items(items), neighbours, document_ids)

    def estimate_precache(
        self,
        items: Iterable[Item | str | Path],
        on_item: Callable[[], None] = lambda: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> PrecacheEstimate:
        """What :meth:`precache` would take, stored nowhere; see ``estimate_precache``."""
        return estimate_precache(self._current().ingest, expand_items(items), on_item, should_stop)

    def stream(
        self,
        question: str,
        documents: Sequence[ContextRef],
        options: AskOptions | None = None,
    ) -> StreamingAnswer:
        """Ask, and read the answer as it grows.

        Args:
            question: The question; it may be empty.
            documents: Ids, references or texts, in the order they should stand in the prompt.
            options: How.

        Raises:
            DocumentNotFoundError: A document is not there.
            ContextLengthExceededError: The prompt does not fit.
            InvalidValueError: Another argument is not acceptable.
            QueueFullError: Too many requests wait.
        """
        options = options or AskOptions()
        turns = [ChatTurn(question, documents)]
        return self.on_current(
            lambda model: model.start(model.planner.plan(turns, options, "question"), options)
        )

    def chat(self, turns: Sequence[ChatTurn], options: AskOptions | None = None) -> StreamingAnswer:
        """Go on with a conversation, and read the answers as they grow.

        Earlier replies are run again, so that an answer does not depend on what is still in
        memory of the earlier turns.

        Args:
            turns: The messages with their documents and replies; the last has no reply.
            options: How.

        Raises:
            DocumentNotFoundError: A document is not there.
            ContextLengthExceededError: The prompt does not fit.
            UnsupportedParameterError: The model's template takes one turn only, or the schema
                cannot be used.
            InvalidValueError: Another argument is not acceptable.
            QueueFullError: Too many requests wait.
        """
        options = options or AskOptions()
        return self.on_current(lambda model: model.start(model.plan_chat(turns, options), options))

    def answer(
        self,
        question: str,
        documents: Sequence[ContextRef],
        *,
        options: AskOptions | None = None,
        policy: str | None = None,
        recompute_ratio: float | None = None,
        target_kl: float | None = None,
        max_tokens: int | None = None,
        compare: bool | None = None,
    ) -> Answer:
        """Ask, and wait for the answer. Errors as in :meth:`stream`.

        Args:
            question: The question.
            documents: Ids, references or texts, in prompt order.
            options: How; the arguments below override it.
            policy: Recompute policy.
            recompute_ratio: Its ratio.
            target_kl: Its target: mean KL divergence in nats (``auto``).
            max_tokens: Largest number of answer tokens.
            compare: Also run the full prefill on the same prompt, and say how close the answer is.
        """
        options = options or AskOptions()
        if policy is not None:
            options = replace(options, policy=policy)
        given = {"recompute_ratio": recompute_ratio, "target_kl": target_kl}
        if given := {name: value for name, value in given.items() if value is not None}:
            options = replace(options, policy_options=replace(options.policy_options, **given))
        if max_tokens is not None:
            options = replace(options, max_tokens=max_tokens)
        if compare is not None:
            options = replace(options, verify=compare)
        return self.stream(question, documents, options).answer()

    def plan(
        self, question: str, documents: Sequence[ContextRef], options: AskOptions
    ) -> FusionPlan:
        """What :meth:`stream` would do, without any model work. Errors as there."""
        return self._current().planner.plan([ChatTurn(question, documents)], options, "question")

    def plan_chat(self, turns: Sequence[ChatTurn], options: AskOptions) -> FusionPlan:
        """What :meth:`chat` would do, without any model work. Errors as there."""
        return self._current().plan_chat(turns, options)

    def on_current(self, action: Callable[[ServingModel], ResultT]) -> ResultT:
        """Do something with one model; again with the next, if a reload came in between."""
        while True:
            serving = self._current()
            try:
                return action(serving)
            except DrainingError:
                if self._current() is serving:
                    raise

    def reload_model(self, progress: Progress = lambda line: None) -> ReloadResult:
        """Load the model again, and answer from it if its files have changed.

        Every cache over this runtime follows. Answers that had begun are finished by the old model;
        what the old model computed is never found for the new one. If the new model cannot be
        loaded or fails the gate, the old one goes on.

        Args:
            progress: Told what is going on, one line at a time.

        Raises:
            ReloadInProgressError: Another reload is under way.
            ModelError: The new model cannot be loaded, is not supported, or fails the gate.
            InvalidValueError: A setting does not fit it.
        """
        result = self._current().runtime.reload(progress)
        gc.collect()  # runtime and engine know each other: the old weights would stay for a while
        return result

    def follow(self) -> None:
        """Let go of a runtime that another has taken the place of. The runtime sees to it."""
        self._current()

    def _current(self) -> ServingModel:
        """What serves now; follows the runtime when its model is reloaded."""
        serving = self._serving
        runtime = serving.runtime.current
        if runtime is not serving.runtime:
            serving = self._serving = ServingModel.over(runtime, self.catalog)
        return serving
