"""One process's model, store and engine, opened together and shared by all tenants."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from chunkcache.background_verification import BackgroundVerifier
from chunkcache.catalog import Catalog
from chunkcache.codecs import Codec, codec_by_name
from chunkcache.engine.constraint import JsonConstraints
from chunkcache.engine.engine import Engine
from chunkcache.entry import Entry
from chunkcache.errors import InvalidValueError
from chunkcache.fusion.layout import prompt_prefix_ids
from chunkcache.fusion.plan import FusionLimits
from chunkcache.fusion.preparation import Preparation
from chunkcache.fusion.template_entries import TemplateEntries
from chunkcache.identity import EntryIdentity, TenantNamespace, chunk_id, tenant_namespace
from chunkcache.model.gate import GateReport, check_gate, gate_fingerprint, run_gate
from chunkcache.model.loading import LoadedModel, load_model
from chunkcache.model.prefill import IsolatedPrefill
from chunkcache.model.template import DEFAULT_SYSTEM
from chunkcache.pages import PagePool
from chunkcache.serving_meter import ServingMeter
from chunkcache.settings import Settings
from chunkcache.short_thread import on_short_thread
from chunkcache.splitting import DocumentSplitter
from chunkcache.store.disk import DiskTier
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.host import HostTier
from chunkcache.store.lease import Lease
from chunkcache.store.reports import keep_report, load_report
from chunkcache.store.stack import TierStack
from chunkcache.store.tier import MissReason
from chunkcache.store.transaction import Transaction

Progress = Callable[[str], None]


class Runtime:
    """A model, a store and an engine. Build it with :meth:`open`; close it when done.

    Attributes:
        settings: What it was opened with.
        model: The loaded model.
        env: The store's environment.
        stack: Entries in all tiers.
        pool: Pages of the requests in flight.
        engine: The model's thread.
        json_constraints: Keeps answers to JSON.
        meter: What was served.
        verifier: Verifies a share of what was served, when the engine is idle.
        codec: How entries are kept.
        preparation: What chunks are prefilled behind.
        reuse_is_lossless: Whether an entry placed behind what it was prefilled behind is exact.
        system: The default system prompt.
        splitter: Cuts documents for this model's tokenizer.
        limits: Where a full prefill runs instead of a fusion.
        gate: What the start-up gate measured.
        prefill: The isolated prefill; only for the engine's thread.
    """

    def __init__(
        self, settings: Settings, model: LoadedModel, env: StoreEnvironment, gate: GateReport
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
        self.prefill = IsolatedPrefill(runner)
        self.stack = TierStack(HostTier(settings.host_tier_bytes), DiskTier(env))
        self.pool = PagePool(
            runner.spec,
            num_tokens=settings.pool_tokens,
            page_tokens=settings.page_tokens,
            dtype=runner.dtype,
            device=runner.device,
        )
        self.engine = Engine(
            runner,
            model.tokenizer,
            self.pool,
            self._load_entry,
            TemplateEntries(
                self.prefill, codec_by_name("raw", runner.dtype), settings.template_tier_bytes
            ).get,
            tile_rows=settings.decode_tile_rows,
            max_queued=settings.max_queued_requests,
        )
        self.json_constraints = JsonConstraints(
            model.tokenizer, runner.spec.vocab_size, runner.eos_token_ids
        )
        self.meter = ServingMeter()
        self.verifier = BackgroundVerifier(self.engine, settings.verify_rate)

    @classmethod
    def open(cls, settings: Settings, progress: Progress = lambda line: None) -> "Runtime":
        """Load the model, open the store, pass the gate.

        The store is opened first: a store that cannot be used should not cost a model's load.

        Raises:
            ModelError: The model cannot be loaded, is not supported, or fails the gate.
            StoreError: The store cannot be used.
            InvalidValueError: A setting does not fit.
        """
        preparation = Preparation.parse(settings.preparation)
        env = StoreEnvironment.open(
            Path(settings.store).expanduser(),
            max_bytes=settings.store_max_bytes,
            read_only=settings.read_only,
        )
        try:
            model = load_model(
                settings.model,
                cache_dir=settings.cache_dir.expanduser(),
                device=settings.device,
                dtype=settings.dtype,
                revision=settings.revision,
                progress=progress,
            )
            if env.network_filesystem is not None:
                progress(
                    f"the store is on {env.network_filesystem}: LMDB is not safe on network "
                    "file systems"
                )
            _check_prefix_fits(model, preparation, settings)
            gate = _pass_gate(model, env, progress)
            return cls(settings, model, env, gate)
        except BaseException:
            env.close()
            raise

    def close(self) -> None:
        """Finish accepted requests, then close everything; idempotent."""
        self.engine.close()
        self.stack.close()
        self.env.close()

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
        """

        def prefill() -> Entry:
            entry, num_rows = self.engine.call(lambda: self._compute(identity)).result()
            on_computed(num_rows)
            return entry

        guard = self._guard(identity)
        lease = self.stack.load_or_prefill(identity, prefill, guard=guard)
        if lease.source == "host" and not self.stack.contains(identity.key()):
            # Another document's removal took it from disk a moment ago.
            lease.warning = self.stack.keep(lease.entry, guard)
        return lease

    def _load_entry(self, identity: EntryIdentity, may_prefill: bool) -> Lease | MissReason:
        if not may_prefill:
            return self.stack.load(identity, waits=False)
        return self.stack.load_or_prefill(
            identity,
            lambda: self._compute(identity)[0],
            guard=self._guard(identity),
            waits=False,
        )

    def _compute(self, identity: EntryIdentity) -> tuple[Entry, int]:
        """The entry, and how many rows were run."""
        assert self.engine.is_engine_thread()
        num_rows_before = self.prefill.num_rows
        entry = self.prefill.compute(identity, self.codec)
        return entry, self.prefill.num_rows - num_rows_before

    def _guard(self, identity: EntryIdentity) -> Callable[[Transaction], bool]:
        """Has the entry deleted with its chunk and with every chunk that it was prepared behind.

        It is not stored once one of them is gone.
        """
        catalog = Catalog(self.env, identity.namespace)
        owner = chunk_id(identity.namespace, self.model.tokenizer.digest, identity.token_ids)
        traced = (owner, *identity.behind)
        return lambda txn: catalog.link_entry_in(txn, identity.key(), traced)


def _check_prefix_fits(model: LoadedModel, preparation: Preparation, settings: Settings) -> None:
    """Refuse a preparation that, with a chunk behind it, is longer than the model's context."""
    system_ids = model.tokenizer.encode_content(settings.system or DEFAULT_SYSTEM)
    limit = model.runner.spec.max_positions
    for prepared in dict.fromkeys((preparation, preparation.without_neighbours)):
        prefix_ids = prepared.prefix_ids(
            model.template,
            model.tokenizer,
            model.bos_token_id,
            prompt_prefix_ids(model.template, system_ids),
            [(0,) * settings.chunk_tokens] * prepared.num_neighbours,
        )
        if len(prefix_ids) + settings.chunk_tokens > limit:
            raise InvalidValueError(
                f"preparation {prepared} ({len(prefix_ids)} tokens) and chunks of "
                f"{settings.chunk_tokens} tokens do not fit the model's {limit} positions",
                param="preparation",
            )


def _pass_gate(model: LoadedModel, env: StoreEnvironment, progress: Progress) -> GateReport:
    """The stored result if it is of this very model and build, else a new one, kept."""
    fingerprint = gate_fingerprint(model.runner)
    report = load_report(env, "gate", fingerprint, GateReport)
    if report is None:
        progress("checking the model once: fused in full against its plain forward")
        report = on_short_thread(lambda: run_gate(model.runner))
        keep_report(env, "gate", fingerprint, report)
    check_gate(report)
    if report.full_only:
        progress(f"the model serves full prefills alone, no reuse: {report.findings()}")
    return report
