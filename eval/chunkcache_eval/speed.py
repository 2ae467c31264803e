"""Speed: fused time to first token against a full prefill of the same prompt, side by side.

Every ratio comes from one process and alternating runs, as medians, because machines are noisy.
Entries are read from disk on every run (the host tier has no room), so a fused time holds the
load, the placing, the probe and the recompute.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from chunkcache.chunk_cache import ChunkCache
from chunkcache.fusion.policies.registry import PolicyOptions
from chunkcache.planning import AskOptions
from chunkcache.precache import TextItem
from chunkcache.results import Answer
from chunkcache.settings import Settings
from chunkcache_api.cli.retrieval import make_neighbours
from chunkcache_eval.datasets.records import Question
from chunkcache_eval.memory import MemoryReport, measure_memory
from chunkcache_eval.question_choice import QuestionChoice, num_context_tokens

Progress = Callable[[str], None]


@dataclass(frozen=True)
class SpeedRun:
    """One question under one policy; times are medians over repeats, in milliseconds.

    Attributes:
        question_id: Which question.
        prompt_tokens: Tokens of the assembled prompt.
        policy: Policy name.
        ratio: Nominal recompute ratio.
        charged_ratio: Rows really run over layers times context tokens.
        full_ttft_ms: Full prefill on the same engine.
        fused_ttft_ms: Fused, everything included.
        speedup: Their ratio.
        floor_ms: Rows run over rows of a full prefill, times the full time, plus the entries'
            bytes at the measured copy bandwidth: what a perfect implementation would need.
        load_ms: Reading and checking entries from disk.
        place_ms: Rotating and scattering them.
        probe_ms: Rows run for the policy's signal.
        recompute_ms: Rows recomputed, and the head.
    """

    question_id: str
    prompt_tokens: int
    policy: str
    ratio: float
    charged_ratio: float
    full_ttft_ms: float
    fused_ttft_ms: float
    speedup: float
    floor_ms: float
    load_ms: float
    place_ms: float
    probe_ms: float
    recompute_ms: float


@dataclass(frozen=True)
class SpeedReport:
    """All of it.

    Attributes:
        runs: One per question, policy and ratio.
        speedup_median: Median of their speed-ups.
        forward_vs_transformers: Time of the library's forward over ours, same prompt: 1 or more
            means that ours is no slower.
        precache_efficiency: Tokens per second of pre-caching over those of bare forwards of the
            same chunks.
        copy_bandwidth_gb_s: Measured memory copy bandwidth, for the floor.
        peak_rss_mb: Peak resident memory of fresh processes.
        model: Model name.
        threads: Threads that the model ran with.
    """

    runs: tuple[SpeedRun, ...]
    speedup_median: float
    forward_vs_transformers: float
    precache_efficiency: float
    copy_bandwidth_gb_s: float
    peak_rss_mb: MemoryReport | None
    model: str
    threads: int

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def measure_speed(
    question_sets: Sequence[Sequence[Question]],
    choice: QuestionChoice,
    *,
    settings: Settings,
    policies: Sequence[tuple[str, float]],
    repeats: int = 3,
    with_memory: bool = True,
    progress: Progress = lambda line: None,
) -> SpeedReport:
    """Measure.

    Args:
        question_sets: At least one question in all.
        choice: Which of each set.
        settings: Model, codec and preparation to measure; the store and limits are replaced.
        policies: Policy names with their ratios.
        repeats: Runs of each, of which the median counts.
        with_memory: Also measure peak memory in fresh processes.
        progress: Told what is going on.
    """
    with tempfile.TemporaryDirectory(prefix="chunkcache-eval-") as folder:
        store = Path(folder) / "store"
        values = settings.model_dump() | {
            "store": store,
            "host_tier_bytes": 0,
            "kept_prompts_ratio": 0.0,
            "chunk_tokens": 1024,
            "min_fused_context_tokens": 0,
            "min_mean_chunk_tokens": 0,
        }
        with ChunkCache.open(progress=progress, **values) as cache:
            _warm_up(cache)
            tokenizer = cache.runtime.model.tokenizer
            questions = [q for one in question_sets for q in choice.of(one, tokenizer)]
            longest = max(questions, key=lambda q: num_context_tokens(q, tokenizer))
            efficiency = _precache(cache, questions, repeats, progress)
            bandwidth = cache.runtime.engine.call(_copy_bandwidth_gb_s).result()
            runs = [
                _run(cache, question, policy, ratio, repeats, bandwidth, progress)
                for question in questions
                for policy, ratio in policies
            ]
            forward = _forward_vs_transformers(cache, questions[0], repeats)
            name, threads = cache.runtime.model.runner.name, torch.get_num_threads()
        memory = None
        if with_memory:
            progress("measuring memory in fresh processes")
            memory = measure_memory(values, longest, questions)
        return SpeedReport(
            runs=tuple(runs),
            speedup_median=statistics.median(r.speedup for r in runs),
            forward_vs_transformers=forward,
            precache_efficiency=efficiency,
            copy_bandwidth_gb_s=bandwidth,
            peak_rss_mb=memory,
            model=name,
            threads=threads,
        )


def _warm_up(cache: ChunkCache) -> None:
    """One small answer and one large product: thread pools and allocators are up."""
    cache.put("warm-up", "This text is here to be read once before anything is measured.")
    for policy in ("full", "none"):
        cache.answer("Ready?", ["warm-up"], policy=policy, max_tokens=2)


def _precache(
    cache: ChunkCache, questions: Sequence[Question], repeats: int, progress: Progress
) -> float:
    """Tokens per second of pre-caching over those of bare forwards of the same chunks.

    The two take turns, and each pre-caching is compared with the bare forwards right before and
    right after it, so that a machine that slows down or speeds up meanwhile does not count for
    either. Every turn but the first works for a tenant of its own, for whom nothing is cached.
    """
    runtime = cache.runtime
    passages = {p.passage_id: p.text for q in questions for p in q.passages}
    ids = [
        torch.tensor([chunk.token_ids])
        for text in passages.values()
        for chunk in runtime.splitter.split(text, cache.catalog.namespace, "text")
    ]
    num_tokens = sum(t.shape[1] for t in ids)
    decoder = runtime.model.runner.hf_model.model

    def bare() -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            for token_ids in ids:
                decoder(input_ids=token_ids, use_cache=False)
        return time.perf_counter() - began

    progress("bare forwards of all chunks")
    before = runtime.engine.call(bare).result()
    efficiencies = []
    for turn in range(repeats):
        tenant = cache if turn == 0 else ChunkCache(runtime, f"turn-{turn}")
        progress(f"pre-caching {len(passages)} passages, {turn + 1} of {repeats}")
        summary = tenant.precache(
            [TextItem(i, text) for i, text in passages.items()],
            neighbours=make_neighbours(tenant, progress),
        )
        after = runtime.engine.call(bare).result()
        bare_rate = num_tokens / ((before + after) / 2)
        efficiencies.append(summary.prefilled_tokens / summary.seconds / bare_rate)
        before = after
    return statistics.median(efficiencies)


def _run(
    cache: ChunkCache,
    question: Question,
    policy: str,
    ratio: float,
    repeats: int,
    bandwidth_gb_s: float,
    progress: Progress,
) -> SpeedRun:
    ids = [p.passage_id for p in question.passages]

    def ask(name: str, options: PolicyOptions) -> Answer:
        how = AskOptions(policy=name, policy_options=options, max_tokens=1)
        return cache.answer(question.question, ids, options=how)

    fused: list[Answer] = []
    full: list[Answer] = []
    for _ in range(repeats):
        fused.append(ask(policy, PolicyOptions(recompute_ratio=ratio)))
        full.append(ask("full", PolicyOptions()))
    full_ms = statistics.median(a.report.timings.ttft_ms for a in full)
    fused_ms = statistics.median(a.report.timings.ttft_ms for a in fused)
    report = fused[0].report
    account = report.account
    num_context = sum(d.tokens for d in report.documents)
    spec, codec = cache.runtime.model.runner.spec, cache.runtime.codec
    num_bytes = num_context * codec.bytes_per_token(
        spec.num_layers, spec.num_kv_heads, spec.head_dim
    )
    share = report.charged_ratio * num_context / account.prompt_tokens
    run = SpeedRun(
        question_id=question.question_id,
        prompt_tokens=account.prompt_tokens,
        policy=policy,
        ratio=ratio,
        charged_ratio=report.charged_ratio,
        full_ttft_ms=full_ms,
        fused_ttft_ms=fused_ms,
        speedup=full_ms / fused_ms,
        floor_ms=share * full_ms + num_bytes / (bandwidth_gb_s * 1e9) * 1e3,
        load_ms=statistics.median(a.report.timings.load_ms for a in fused),
        place_ms=statistics.median(a.report.timings.place_ms for a in fused),
        probe_ms=statistics.median(a.report.timings.probe_ms for a in fused),
        recompute_ms=statistics.median(a.report.timings.recompute_ms for a in fused),
    )
    progress(f"{run.question_id}: {run.prompt_tokens} tokens, {policy} {run.speedup:.1f}x")
    return run


def _forward_vs_transformers(cache: ChunkCache, question: Question, repeats: int) -> float:
    ids = [p.passage_id for p in question.passages]
    options = AskOptions(policy="full", max_tokens=1)
    token_ids = torch.tensor([cache.plan(question.question, ids, options).layout.token_ids])
    model = cache.runtime.model.runner.hf_model

    def library() -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            model(input_ids=token_ids, use_cache=False, logits_to_keep=1)
        return (time.perf_counter() - began) * 1e3

    theirs, ours = [], []
    for _ in range(repeats):
        theirs.append(cache.runtime.engine.call(library).result())
        timings = cache.answer(question.question, ids, options=options).report.timings
        ours.append(timings.recompute_ms)
    return statistics.median(theirs) / statistics.median(ours)


def _copy_bandwidth_gb_s() -> float:
    source = torch.ones(64 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return source.nbytes / statistics.median(times) / 1e9
