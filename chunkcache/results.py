"""What callers get back: typed values with one JSON form each."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from chunkcache.accounting import PromptTokenAccount
from chunkcache.estimate import EstimateReport
from chunkcache.fusion.prompt_use import PromptUse

ChunkSource = Literal["device", "host", "disk", "remote", "computed", "not_loaded", "skipped"]
"""Where a document's chunks came from. ``computed``: missing, prefilled for this request;
``not_loaded``: the policy recomputes everything; ``skipped``: missing and left out as asked."""
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class ReuseWarning:
    """A fallback or oddity that the caller should see.

    Attributes:
        code: Stable reason, also a counter's label.
        message: One sentence.
        document_id: The document concerned, if one is.
    """

    code: str
    message: str
    document_id: str | None = None


@dataclass(frozen=True)
class DocumentReport:
    """One document's share of a prompt.

    Attributes:
        id: The document's id.
        tokens: Its tokens in the prompt.
        chunks: Its chunks in the prompt.
        source: Where its chunks came from (the slowest, where they differ).
        recomputed_tokens: Its tokens whose rows were run again.
        load_ms: Time to load its entries, prefilling the missing ones included.
    """

    id: str
    tokens: int
    chunks: int
    source: ChunkSource
    recomputed_tokens: int
    load_ms: float


@dataclass(frozen=True)
class Timings:
    """Where the time to the first token went, in milliseconds.

    Attributes:
        queue_ms: Waiting for the engine.
        load_ms: Loading entries (of which ``prefill_ms`` prefilled missing ones).
        prefill_ms: Prefilling missing chunks in isolation.
        place_ms: Rotating and scattering entries into pages.
        probe_ms: Running rows for a policy's signals.
        recompute_ms: Running the selected rows, and the head.
        ttft_ms: From submission to the first token.
        decode_ms: From the first token to the last.
    """

    queue_ms: float = 0.0
    load_ms: float = 0.0
    prefill_ms: float = 0.0
    place_ms: float = 0.0
    probe_ms: float = 0.0
    recompute_ms: float = 0.0
    ttft_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True)
class FusionReport:
    """What one fusion did.

    Attributes:
        policy: The policy that ran, with its parameters, for example ``hybrid(0.15, k=4)``.
        requested_policy: The policy asked for (another one where a fallback was taken).
        preparation: How the chunks had been prefilled.
        exact: Whether the answer is a full prefill's answer by construction.
        nominal_ratio: The ratio asked for, None for policies without one.
        charged_ratio: Rows run over all layers, probes and fixed rows included, over layers
            times context tokens.
        account: Every prompt token by source.
        use: What became of every prompt token.
        documents: Per document.
        warnings: Every fallback taken.
        timings: Where the time went.
        estimate: How close the answer takes itself to be, of a policy that has a target.
    """

    policy: str
    requested_policy: str
    preparation: str
    exact: bool
    nominal_ratio: float | None
    charged_ratio: float
    account: PromptTokenAccount
    use: PromptUse
    documents: tuple[DocumentReport, ...]
    warnings: tuple[ReuseWarning, ...]
    timings: Timings
    estimate: EstimateReport | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """One token of an answer and what else might have stood there.

    Attributes:
        token_id: The token.
        logprob: Natural logarithm of its probability under the model, at temperature 1.
        top: The most likely tokens with theirs, the likeliest first; ties go to the lower id.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Citation:
    """A document that was in the prompt, as the answer's possible source."""

    document_id: str
    chunk_indexes: tuple[int, ...]


@dataclass(frozen=True)
class Verification:
    """How close a fused answer is to the full prefill's answer to the same prompt.

    Attributes:
        kl_first: KL divergence (nats) of the fused from the full first-token distribution.
        mean_kl: Mean KL divergence (nats) behind the prompt and the leading tokens of the full
            prefill's answer.
        agreement: Share of leading tokens that are the same, over the longer answer; 1 for two
            equal ones.
        agreeing_tokens: How many leading tokens are the same.
        full_answer: The full prefill's answer.
        full_token_ids: Its token ids.
        full_ttft_ms: Its time to the first token, measured in the same engine.
    """

    kl_first: float
    mean_kl: float
    agreement: float
    agreeing_tokens: int
    full_answer: str
    full_token_ids: tuple[int, ...]
    full_ttft_ms: float

    def to_dict(self) -> dict[str, Any]:
        """The form of ``chunkcache.verify`` in a response."""
        values = _rounded(asdict(self))
        del values["full_token_ids"]
        return values


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    Attributes:
        id: Server-made id.
        model: Display name of the model.
        text: The answer.
        token_ids: Its token ids, the final end token left out.
        finish_reason: Why it ended.
        report: What was reused and what was run.
        citations: The documents in the prompt.
        verification: How close it is to the full prefill's answer, when asked for.
        logprobs: Of its tokens, when asked for.
    """

    id: str
    model: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    report: FusionReport
    citations: tuple[Citation, ...]
    verification: Verification | None = None
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def speedup(self) -> float | None:
        """The full prefill's time to the first token over this answer's; None if not verified."""
        if self.verification is None:
            return None
        return self.verification.full_ttft_ms / self.report.timings.ttft_ms

    @property
    def usage(self) -> dict[str, Any]:
        """Token usage under OpenAI's names, with the reuse details of ours."""
        return usage_of([self])

    def to_dict(self) -> dict[str, Any]:
        """The body of ``POST /v1/query``."""
        return {
            "id": self.id,
            "object": "chunkcache.answer",
            "model": self.model,
            "answer": self.text,
            "finish_reason": self.finish_reason,
            "citations": [asdict(c) for c in self.citations],
            "usage": self.usage,
            "chunkcache": self.reuse(),
        }

    def reuse(self) -> dict[str, Any]:
        """What was reused and what was run: the block ``chunkcache`` of a response."""
        report = self.report
        return {
            "exact": report.exact,
            "policy": report.policy,
            "requested_policy": report.requested_policy,
            "preparation": report.preparation,
            "nominal_ratio": report.nominal_ratio,
            "charged_ratio": round(report.charged_ratio, 4),
            "documents": [_rounded(asdict(d)) for d in report.documents],
            "timings": _rounded(asdict(report.timings)),
            "warnings": [asdict(w) for w in report.warnings],
            "estimate": None if report.estimate is None else report.estimate.to_dict(),
            "verify": None if self.verification is None else self.verification.to_dict(),
        }


def usage_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Token usage of the answers to one prompt, which counts once."""
    account = answers[0].report.account
    num_tokens = sum(len(a.token_ids) for a in answers)
    return {
        "prompt_tokens": account.prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": account.prompt_tokens + num_tokens,
        "prompt_tokens_details": account.details(),
    }


@dataclass(frozen=True)
class IngestResult:
    """What storing a document did.

    Attributes:
        status: ``created``, ``updated`` or ``unchanged``.
        document_id: The document's id.
        version: Its version now.
        digest: Hex digest of its text.
        num_tokens: Tokens of all chunks.
        num_chunks: Chunks.
        prefilled_chunks: Chunks that were run through the model for this call.
        prefilled_tokens: Their tokens.
        reused_chunks: Chunks whose entries were there already.
        refused_chunks: Chunks whose keys or values were not finite; they have no entry and run
            in place when they are asked for.
        unprepared_chunks: Chunks of other documents that had been prepared behind a chunk which
            is gone now: the next pre-caching run prepares them anew.
        not_kept_chunks: Chunks that the budget on disk has no room for; they are computed when
            they are asked for.
    """

    status: Literal["created", "updated", "unchanged"]
    document_id: str
    version: int
    digest: str
    num_tokens: int
    num_chunks: int
    prefilled_chunks: int
    prefilled_tokens: int
    reused_chunks: int
    refused_chunks: int = 0
    unprepared_chunks: int = 0
    not_kept_chunks: int = 0


@dataclass(frozen=True)
class RemovalResult:
    """What removing a document did.

    Attributes:
        removed_entries: Entries that went: of chunks that no other document holds, and those
            prepared behind such a chunk.
        unprepared_chunks: Chunks of other documents among those prepared behind one: the next
            pre-caching run prepares them anew, and until then they do without neighbours.
    """

    removed_entries: int
    unprepared_chunks: int


@dataclass(frozen=True)
class ReloadResult:
    """What reloading the model came to.

    Attributes:
        changed: Whether anything differs; if not, the model that was loaded goes on.
        model: Display name.
        digest: Hex digest of the model that is served now.
        previous_digest: Hex digest of the one before.
        dropped_entries: Entries of the one before that were in RAM; those on disk stay, and serve
            again if it comes back.
        full_only: Whether the gate found that only full prefills are right now.
    """

    changed: bool
    model: str
    digest: str
    previous_digest: str
    dropped_entries: int
    full_only: bool


@dataclass(frozen=True)
class ItemFailure:
    """One item of a corpus that could not be cached, and why."""

    item: str
    code: str
    message: str


@dataclass(frozen=True)
class PrecacheSummary:
    """What a pre-caching run did.

    Attributes:
        documents: Items stored or found unchanged.
        created: New documents.
        updated: Documents whose text had changed.
        unchanged: Documents that were there already.
        chunks: Chunks of all documents.
        tokens: Tokens of all documents.
        prefilled_chunks: Chunks run through the model.
        prefilled_tokens: Their tokens.
        prefill_rows: Rows run through the model for them, those of what they are prepared behind
            included.
        prefill_rows_per_token: ``prefill_rows`` over ``prefilled_tokens``; 0 if there are none.
        without_neighbours: Chunks that no neighbours were found for though the preparation wants
            some; they are prepared behind the preamble.
        seconds: Wall time.
        tokens_per_second: ``prefilled_tokens`` over ``seconds``.
        failures: Items that could not be cached.
        interrupted: Whether the run was stopped before its end.
        not_kept_chunks: Chunks that the budget on disk has no room for beside what this run has
            stored and what is worth more; they are computed when they are asked for.
    """

    documents: int
    created: int
    updated: int
    unchanged: int
    chunks: int
    tokens: int
    prefilled_chunks: int
    prefilled_tokens: int
    prefill_rows: int
    prefill_rows_per_token: float
    without_neighbours: int
    seconds: float
    tokens_per_second: float
    failures: tuple[ItemFailure, ...] = field(default=())
    interrupted: bool = False
    not_kept_chunks: int = 0


def _rounded(values: dict[str, Any], digits: int = 6) -> dict[str, Any]:
    return {k: round(v, digits) if isinstance(v, float) else v for k, v in values.items()}
