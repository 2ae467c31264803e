"""How close this model's fused answers are to its full prefill's, on the built-in probe set.

Measured with the settings in force, on the engine's thread, step by step between requests, over
pages and entries of its own: nothing is stored but the figures, under a name for all that they
depend on.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from statistics import mean
from typing import Final, Literal

import msgspec

from chunkcache.catalog import Catalog
from chunkcache.codecs import codec_by_name
from chunkcache.engine.decode import DecodeTile
from chunkcache.engine.request import GenerationJob
from chunkcache.engine.sampling import SamplingParams
from chunkcache.engine.solo import SoloRunner
from chunkcache.errors import ContextLengthExceededError
from chunkcache.fusion.layout import ChunkRef, Turn
from chunkcache.fusion.plan import FusionPlan, PromptParts
from chunkcache.fusion.policies.registry import PolicyOptions, make_policy
from chunkcache.fusion.policy import Policy
from chunkcache.fusion.template_entries import TemplateEntries
from chunkcache.identity import EntryIdentity, TenantNamespace, digest_fields
from chunkcache.model.gate import gate_fingerprint
from chunkcache.pages import PagePool
from chunkcache.planning import AskOptions, PromptPlanner
from chunkcache.probe_set import ProbeSet, built_in_probe_set
from chunkcache.results import FusionReport, Verification
from chunkcache.runtime import Runtime
from chunkcache.store.host import HostTier
from chunkcache.store.lease import Lease
from chunkcache.store.reports import keep_report, load_report
from chunkcache.store.stack import TierStack
from chunkcache.store.tier import MissReason
from chunkcache.verification import COMPARED_TOKENS, verification_steps

PROBE_VERSION: Final = 1
"""Raised when the probe measures something else."""
REPORT_KIND: Final = "fidelity"

Closeness = Literal["exact", "very_close", "close", "loose", "far"]
_NAMESPACE = TenantNamespace(b"probe")
_ENTRY_BYTES: Final = 1 << 40
"""No bound: the entries of the probe set are there for one run."""
_BOUNDS: Final[tuple[tuple[float, Closeness], ...]] = (
    (1e-6, "exact"),
    (0.01, "very_close"),
    (0.05, "close"),
    (0.2, "loose"),
)
"""Mean KL in nats below which answers are called so."""


class FidelityReport(msgspec.Struct, frozen=True):
    """What the probe measured.

    Attributes:
        model_name: Display name.
        policy: The policy that ran, with its parameters.
        preparation: What chunks were prefilled behind.
        codec: How entries were kept.
        num_questions: Questions asked.
        num_context_tokens: Chunk tokens in each prompt.
        compared_tokens: Leading answer tokens that were compared.
        kl_first: KL divergence of the first answer token, in nats; mean over the questions.
        mean_kl: Mean KL divergence over the compared tokens, in nats; mean over the questions.
        worst_kl: The largest of the questions' mean KL divergences.
        agreement: Share of leading greedy tokens that are the full prefill's.
        charged_ratio: Rows run, over what a bare prefill of the context runs.
        fingerprint: Hex digest of all that the figures depend on.
    """

    model_name: str
    policy: str
    preparation: str
    codec: str
    num_questions: int
    num_context_tokens: int
    compared_tokens: int
    kl_first: float
    mean_kl: float
    worst_kl: float
    agreement: float
    charged_ratio: float
    fingerprint: str

    @property
    def closeness(self) -> Closeness:
        """The mean KL in a word."""
        for bound, word in _BOUNDS:
            if self.mean_kl < bound:
                return word
        return "far"


def stored_fidelity(runtime: Runtime) -> FidelityReport | None:
    """The figures of the settings in force, if they have been measured with this store.

    Raises:
        StoreError: The store cannot be read.
    """
    fingerprint = _fingerprint(runtime, built_in_probe_set())
    return load_report(runtime.env, REPORT_KIND, fingerprint, FidelityReport)


def measure_fidelity(
    runtime: Runtime,
    progress: Callable[[str], None] = lambda line: None,
    probes: ProbeSet | None = None,
) -> FidelityReport:
    """Measure, keep the figures in the store, and give them back.

    Seconds for a small model; requests go on meanwhile. No document is written, and settings about
    when fusion pays are left aside: the policy always runs, unless the model serves full prefills
    alone.

    Args:
        runtime: Model, store and engine.
        progress: Told what is going on, one line at a time, on the caller's thread.
        probes: What to ask; None is the built-in set.

    Raises:
        ContextLengthExceededError: The model has no room for the prompts.
        InvalidValueError: The policy in force does not fit the model.
        StoreFullError: There is no room for the figures.
        DrainingError: The engine is stopping.
    """
    run = _ProbeRun(runtime, probes or built_in_probe_set())
    steps = run.steps()
    try:
        while True:
            line = runtime.engine.call(lambda: next(steps)).result()
            if line is not None:
                progress(line)
    except StopIteration as stop:
        report: FidelityReport = stop.value
    keep_report(runtime.env, REPORT_KIND, report.fingerprint, report)
    return report


def _policy(runtime: Runtime) -> Policy:
    settings = runtime.settings
    return make_policy(
        settings.policy, PolicyOptions(), settings.recompute_ratio, settings.target_kl
    )


def _fingerprint(runtime: Runtime, probes: ProbeSet) -> str:
    fields = [
        ("probe", PROBE_VERSION),
        ("probes", probes.digest()),
        ("model", gate_fingerprint(runtime.model.runner)),
        ("answers", runtime.model.answers_digest()),
        ("policy", str(_policy(runtime))),
        ("preparation", str(runtime.preparation)),
        ("codec", runtime.codec.name),
        ("system", runtime.system),
        ("chunk_tokens", runtime.settings.chunk_tokens),
    ]
    return digest_fields("fidelity", fields).hex()


class _ProbeRun:
    """One run over a probe set. Its steps are for the engine's thread."""

    def __init__(self, runtime: Runtime, probes: ProbeSet) -> None:
        self._runtime = runtime
        self._probes = probes
        self._policy = _policy(runtime)
        planner = PromptPlanner(runtime, Catalog(runtime.env, _NAMESPACE))
        self._plans = [
            self._plan(planner, question, probes.passages_for(index))
            for index, question in enumerate(probes.questions)
        ]
        needed = max(plan.layout.num_tokens for plan in self._plans) + COMPARED_TOKENS
        limit = runtime.model.runner.spec.max_positions
        if needed > limit:
            raise ContextLengthExceededError(
                f"the fidelity probe's prompts and answers have {needed} tokens, over the model's "
                f"{limit}"
            )
        self._num_slots = needed

    def steps(self) -> Generator[str | None, None, FidelityReport]:
        """Yields lines of progress, and None at other boundaries; returns the report."""
        solo = self._solo()
        found: list[tuple[FusionReport, Verification]] = []
        for number, plan in enumerate(self._plans, 1):
            question = self._probes.questions[number - 1]
            yield f"fidelity probe {number} of {len(self._plans)}: {question}"
            job = GenerationJob(plan, SamplingParams(), COMPARED_TOKENS)
            fused = yield from solo.steps(job)
            found.append((fused.report, (yield from verification_steps(job, fused, solo.steps))))
        return self._report(found)

    def _plan(
        self, planner: PromptPlanner, question: str, passages: Sequence[tuple[str, str]]
    ) -> FusionPlan:
        runtime = self._runtime
        splitter, tokenizer = runtime.splitter, runtime.model.tokenizer
        documents = tuple(
            tuple(
                ChunkRef(name, index, chunk.token_ids)
                for index, chunk in enumerate(splitter.split(text, _NAMESPACE, "text"))
            )
            for name, text in passages
        )
        turn = Turn(documents, tokenizer.encode_content(question))
        parts = PromptParts(runtime.model.template, planner.system_ids(None), (turn,))
        plan = planner.plan_parts(parts, self._policy, AskOptions())
        if runtime.limits.full_only:
            return plan
        return replace(plan, policy=plan.requested_policy, warnings=())

    def _solo(self) -> SoloRunner:
        runtime, settings = self._runtime, self._runtime.settings
        runner, prefill = runtime.model.runner, runtime.prefill
        pool = PagePool(
            runner.spec,
            num_tokens=self._num_slots + settings.page_tokens,
            page_tokens=settings.page_tokens,
            dtype=runner.dtype,
            device=runner.device,
        )
        stack = TierStack(HostTier(_ENTRY_BYTES), None)
        templates = TemplateEntries(prefill, codec_by_name("raw", runner.dtype), _ENTRY_BYTES)

        def load(identity: EntryIdentity, may_prefill: bool) -> Lease | MissReason:
            assert may_prefill
            return stack.load_or_prefill(identity, lambda: prefill.compute(identity, runtime.codec))

        tile = DecodeTile(runner, pool, settings.decode_tile_rows)
        return SoloRunner(runner, runtime.model.tokenizer, pool, load, templates.get, tile)

    def _report(self, found: Sequence[tuple[FusionReport, Verification]]) -> FidelityReport:
        runtime = self._runtime
        reports = [report for report, _ in found]
        verifications = [verification for _, verification in found]
        return FidelityReport(
            model_name=runtime.model.runner.name,
            policy=reports[0].policy,
            preparation=str(runtime.preparation),
            codec=runtime.codec.name,
            num_questions=len(found),
            num_context_tokens=self._plans[0].layout.num_context_tokens,
            compared_tokens=COMPARED_TOKENS,
            kl_first=mean(v.kl_first for v in verifications),
            mean_kl=mean(v.mean_kl for v in verifications),
            worst_kl=max(v.mean_kl for v in verifications),
            agreement=mean(v.agreement for v in verifications),
            charged_ratio=mean(r.charged_ratio for r in reports),
            fingerprint=_fingerprint(runtime, self._probes),
        )
