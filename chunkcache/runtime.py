"""One process's model, store and engine, opened together and shared by all tenants.

A runtime's model never changes. Reloading makes another runtime over the same store, which takes its
place: whatever was planned for a model runs on that model or not at all.
"""

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from chunkcache.background_verification import BackgroundVerifier
from chunkcache.calibration import stored_calibration
from chunkcache.catalog import Catalog
from chunkcache.codecs import Codec, codec_by_name
from chunkcache.disk_uses import keep_disk_uses, open_disk_budget
from chunkcache.engine.constraint import JsonConstraints
from chunkcache.engine.engine import Engine
from chunkcache.engine.kept_pages import KeptPages
from chunkcache.engine.kept_prompts import KeptPrompts
from chunkcache.entry import Entry
from chunkcache.entry_window import EntryWindow
from chunkcache.errors import DrainingError
from chunkcache.fusion.plan import FusionLimits
from chunkcache.fusion.preparation import Preparation
from chunkcache.fusion.template_entries import TemplateEntries
from chunkcache.identity import ChunkId, EntryIdentity, TenantNamespace, chunk_id, tenant_namespace
from chunkcache.model.gate import GateReport
from chunkcache.model.loading import LoadedModel
from chunkcache.model.prefill import IsolatedPrefill
from chunkcache.model.template import DEFAULT_SYSTEM
from chunkcache.model_opening import (
    check_prefix_fits,
    load_configured_model,
    load_successor,
    pass_gate,
    second_model,
)
from chunkcache.pages import PagePool
from chunkcache.prefill_packs import PrefillPacks
from chunkcache.quota import TenantQuota
from chunkcache.results import ReloadResult
from chunkcache.serving_meter import ServingMeter
from chunkcache.settings import Settings
from chunkcache.splitting import DocumentSplitter
from chunkcache.store.disk import DiskTier
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.eviction.registry import make_eviction
from chunkcache.store.host import HostTier
from chunkcache.store.lease import Lease
from chunkcache.store.load_speed import Calibration, LoadSpeed
from chunkcache.store.remote.opening import open_configured_remote
from chunkcache.store.remote.remote_cache import RemoteCache
from chunkcache.store.stack import TierStack
from chunkcache.store.tier import MissReason
from chunkcache.store.transaction import Transaction
from chunkcache.succession import Succession, reload_result

Progress = Callable[[str], None]


class Runtime:
    """A model, a store and an engine. Build it with :meth:`open`; close it when done.

    Attributes:
        settings: What it was opened with.
        model: The loaded model.
        env: The store's environment.
        disk: Entries on disk.
        stack: Entries in all tiers.
        remote: The remote tier, if there is one.
        pool: Pages of the requests in flight.
        kept: Finished prompts' pages in the pool.
        kept_prompts: Which of them a prompt may begin with.
        engine: The model's thread.
        json_constraints: Keeps answers to JSON.
        meter: What was served.
        verifier: Verifies a share of what was served, when the engine is idle.
        codec: How entries are kept.
        preparation: What chunks are prefilled behind.
        reuse_is_lossless: Whether an entry placed behind what it was prefilled behind is exact.
        system: The default system prompt.
        splitter: Cuts documents for this model's tokenizer.
        quota: What the documents of one tenant may take.
        limits: Where a full prefill runs instead of a fusion.
        gate: What the start-up gate measured.
        succession: The runtimes over this store, one after each reload.
        prefill: The isolated prefill of what requests miss; only for the engine's thread.
        packs: The isolated prefills of whoever is not the engine's thread.
        window: For work on many entries at once.
        load_speed: What loading costs against prefilling.
    """

    def __init__(
        self,
        settings: Settings,
        model: LoadedModel,
        env: StoreEnvironment,
        gate: GateReport,
        calibration: Calibration,
        predecessor: "Runtime | None" = None,
        remote: RemoteCache | None = None,
    ) -> None:
        runner = model.runner
        self.settings = settings
        self.model = model
        self.env = env
        self.gate = gate
        self.codec: Codec = codec_by_name(settings.codec, runner.dtype)
        self.preparation = Preparation.parse(settings.preparation)
        self.reuse_is_lossless = (
            self.codec.dtype == runner.dtype and not runner.spec.rope.is_length_dependent
        )
        self.system = DEFAULT_SYSTEM if settings.system is None else settings.system
        self.splitter = DocumentSplitter(model.tokenizer, settings.chunk_tokens)
        self.limits = FusionLimits(
            settings.min_fused_context_tokens,
            settings.min_mean_chunk_tokens,
            settings.max_fused_ratio,
            full_only=gate.full_only,
        )
        self.quota = self._quota_of_a_tenant()
        self.prefill = IsolatedPrefill(runner)
        if predecessor is None:
            host = HostTier(
                settings.host_tier_bytes,
                make_eviction(settings.host_eviction, settings.host_tier_bytes),
                max_pinned_ratio=settings.max_pinned_ratio,
            )
            self.load_speed = LoadSpeed(calibration)
            self.remote = remote
            self.disk = DiskTier(env, open_disk_budget(settings, env))
            self.stack = TierStack(host, self.disk, self.load_speed, remote)
            if remote is not None:
                remote.start(self.load_speed)
            self.meter = ServingMeter()
            self.succession = Succession(self)
        else:
            self.load_speed = predecessor.load_speed
            self.remote = predecessor.remote
            self.disk = predecessor.disk
            self.stack = predecessor.stack
            self.meter = predecessor.meter
            self.succession = predecessor.succession
        self.pool = PagePool(
            runner.spec,
            num_tokens=settings.pool_tokens,
            page_tokens=settings.page_tokens,
            dtype=runner.dtype,
            device=runner.device,
        )
        can_keep = not runner.spec.rope.is_length_dependent
        self.kept = KeptPages(
            self.pool,
            int(self.pool.num_pages * settings.kept_prompts_ratio) if can_keep else 0,
            lambda namespace, chunk_ids: Catalog(env, namespace).held_chunks(chunk_ids),
        )
        self.kept_prompts = KeptPrompts(self.kept, self.pool.page_tokens, model.tokenizer.digest)
        self.engine = Engine(
            runner,
            model.tokenizer,
            self.pool,
            self._load_entry,
            TemplateEntries(
                self.prefill, codec_by_name("raw", runner.dtype), settings.template_tier_bytes
            ).get,
            self.kept,
            self.kept_prompts,
            tile_rows=settings.decode_tile_rows,
            max_queued=settings.max_queued_requests,
            max_queued_tokens=settings.max_queued_tokens,
        )
        self.packs = PrefillPacks(
            self.engine, IsolatedPrefill(runner), self.codec, self.load_speed.note_prefill
        )
        self.window = EntryWindow()
        self.json_constraints = JsonConstraints(
            model.tokenizer, runner.spec.vocab_size, runner.eos_token_ids
        )
        self.verifier = BackgroundVerifier(self.engine, settings.verify_rate)
        if predecessor is not None:
            # Last: the predecessor goes on serving where anything before this fails.
            self.load_speed.restart(calibration)

    @classmethod
    def open(cls, settings: Settings, progress: Progress = lambda line: None) -> "Runtime":
        """Load the model, open the store, pass the gate.

        The store is opened first: a store that cannot be used should not cost a model's load.

        Raises:
            ModelError: The model cannot be loaded, is not supported, or fails the gate.
            StoreError: The store cannot be used.
            InvalidValueError: A setting does not fit.
            MissingExtraError: A setting asks for a package that is not installed.
        """
        preparation = Preparation.parse(settings.preparation)
        env = StoreEnvironment.open(
            Path(settings.store).expanduser(),
            max_bytes=settings.store_max_bytes,
            read_only=settings.read_only,
        )
        try:
            remote = open_configured_remote(settings, env, progress)
            model = load_configured_model(settings, progress)
            if env.network_filesystem is not None:
                progress(
                    f"the store is on {env.network_filesystem}: LMDB is not safe on network "
                    "file systems"
                )
            check_prefix_fits(model, preparation, settings)
            gate = pass_gate(model, env, progress)
            codec = codec_by_name(settings.codec, model.runner.dtype)
            calibration = stored_calibration(model.runner, codec, env, progress)
            return cls(settings, model, env, gate, calibration, remote=remote)
        except BaseException:
            env.close()
            raise

    @property
    def current(self) -> "Runtime":
        """The runtime in whose place this one's users should be: itself, until a reload."""
        return self.succession.current

    def reload(self, progress: Progress = lambda line: None) -> ReloadResult:
        """Load the model again as the settings say, and serve it from now on if it has changed.

        The old model goes on serving while the new one is loaded and passes the gate, and if that
        fails. Then new requests go to the new one; this returns when the old one has finished what
        it had accepted. Both are in memory meanwhile. No entry of the old model is found for the
        new one, whose digest differs; those in RAM are dropped, those on disk stay.

        Raises:
            ReloadInProgressError: Another reload is under way.
            DrainingError: The runtime is closed.
            ModelError: The new model cannot be loaded, is not supported, or fails the gate.
            InvalidValueError: A setting does not fit it.
        """
        with self.succession.reloading() as succession:
            old, settings, env = succession.current, self.settings, self.env
            with second_model():
                model = load_successor(old.model, settings, progress)
                if model is None:
                    return reload_result(old, old, 0)
                check_prefix_fits(model, self.preparation, settings)
                gate = pass_gate(model, env, progress)
                codec = codec_by_name(settings.codec, model.runner.dtype)
                calibration = stored_calibration(model.runner, codec, env, progress)
                new = Runtime(settings, model, env, gate, calibration, old)
            succession.current = new
            num_dropped = old.stack.forget_model(old.model.runner.digest)
            old.engine.close()
            old.window.close()
            # What it was answering until now may have brought entries back.
            old.stack.forget_model(old.model.runner.digest)
            succession.tell_followers()
            return reload_result(old, new, num_dropped)

    def close(self) -> None:
        """Finish accepted requests, then close everything, whatever was reloaded; idempotent."""
        with self.succession.closing() as succession:
            succession.current.engine.close()
            succession.current.window.close()
            keep_disk_uses(self.disk.budget, self.env)
            self.stack.close()
            self.env.close()

    def entry_bytes(self, identity: EntryIdentity) -> int:
        """Bytes of an entry's keys and values as they are stored."""
        return len(identity.token_ids) * self._bytes_per_token

    @property
    def _bytes_per_token(self) -> int:
        spec = self.model.runner.spec
        return self.codec.bytes_per_token(spec.num_layers, spec.num_kv_heads, spec.head_dim)

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def namespace(self, tenant: str) -> TenantNamespace:
        """A tenant's namespace in this store."""
        return tenant_namespace(self.env.secret, tenant)

    def ensure_entry(
        self, identity: EntryIdentity, on_computed: Callable[[int], None] = lambda num_rows: None
    ) -> Lease:
        """The entry, computed and stored if no tier has it. Waits for the engine's thread.

        Args:
            identity: What is wanted.
            on_computed: Told how many rows were run to compute it, those of a prefix included.

        Raises:
            DrainingError: The runtime is closed, or another has taken its place.
        """

        def prefill() -> Entry:
            prefilled = self.packs.request(identity).result()
            on_computed(prefilled.num_rows)
            return prefilled.entry

        assert identity.model == self.model.runner.digest, "an entry of another model"
        traced = self._traced(identity)
        guard = self._guard(identity, traced)
        lease = self.stack.load_or_prefill(identity, prefill, guard=guard, traced=traced)
        if lease.source == "host" and not self.stack.contains(identity.key()):
            # Another document's removal took it from disk a moment ago.
            lease.warning = self.stack.keep(lease.entry, guard, traced)
        try:
            self.check_current()
        except DrainingError:
            lease.release()
            raise
        return lease

    def follow_removals(self) -> None:
        """Drop from memory what has gone from disk: entries, and prompts with chunks that are gone."""
        self.stack.follow_removals()
        self.kept.drop_gone()

    def check_current(self) -> None:
        """Refuse to go on for a model that another has taken the place of.

        What the reload has dropped from RAM may have come back from disk meanwhile: it goes again.

        Raises:
            DrainingError: There was a reload.
        """
        current = self.current
        if current is self:
            return
        digest = self.model.runner.digest
        if current.model.runner.digest != digest:
            self.stack.forget_model(digest)
        raise DrainingError("the model was reloaded meanwhile")

    def _quota_of_a_tenant(self) -> TenantQuota | None:
        max_bytes = self.settings.tenant_max_bytes
        return None if max_bytes is None else TenantQuota(max_bytes, self._bytes_per_token)

    def _load_entry(self, identity: EntryIdentity, may_prefill: bool) -> Lease | MissReason:
        traced = self._traced(identity)
        guard = self._guard(identity, traced)
        if not may_prefill:
            return self.stack.load(identity, guard=guard, traced=traced, waits=False)
        return self.stack.load_or_prefill(
            identity,
            lambda: self._compute(identity),
            guard=guard,
            traced=traced,
            waits=False,
            may_lend=True,  # a fusion that prefills what is missing places each entry at once
        )

    def _compute(self, identity: EntryIdentity) -> Entry:
        """The entry, on the engine's thread."""
        assert self.engine.is_engine_thread()
        assert identity.model == self.model.runner.digest, "an entry of another model"
        num_rows_before = self.prefill.num_rows
        started = time.perf_counter()
        entry = self.prefill.compute(identity, self.codec)
        self.load_speed.note_prefill(
            self.prefill.num_rows - num_rows_before, time.perf_counter() - started
        )
        return entry

    def _traced(self, identity: EntryIdentity) -> tuple[ChunkId, ...]:
        """The chunks that an entry goes with: its own, and those that it was prepared behind."""
        owner = chunk_id(identity.namespace, self.model.tokenizer.digest, identity.token_ids)
        return (owner, *identity.behind)

    def _guard(
        self, identity: EntryIdentity, traced: tuple[ChunkId, ...]
    ) -> Callable[[Transaction], bool]:
        """Has the entry deleted with each of some chunks; not stored once one of them is gone."""
        catalog = Catalog(self.env, identity.namespace)
        return lambda txn: catalog.link_entry_in(txn, identity.key(), traced)
