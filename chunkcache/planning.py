"""From a question and documents to a plan: chunks looked up, prompt laid out, policy chosen."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from chunkcache.auto_calibration import auto_table
from chunkcache.catalog import Catalog
from chunkcache.documents import Document
from chunkcache.engine.sampling import SamplingParams
from chunkcache.entry_naming import EntryNames
from chunkcache.errors import DocumentNotFoundError, InvalidValueError
from chunkcache.fusion.layout import ChunkRef, PromptStyle, Turn
from chunkcache.fusion.plan import FusionPlan, OnMiss, PromptParts, plan_fusion
from chunkcache.fusion.policies.auto import Auto
from chunkcache.fusion.policies.registry import PolicyOptions, make_policy
from chunkcache.fusion.policy import Policy
from chunkcache.loose_text import LooseTexts, TextRef
from chunkcache.results import ReuseWarning
from chunkcache.runtime import Runtime
from chunkcache.splitting import format_of_fingerprint

MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_TOP_LOGPROBS: Final = 20


@dataclass(frozen=True)
class DocumentRef:
    """A document in a question, or some of its chunks.

    Attributes:
        document_id: The document.
        chunk_indexes: Which of its chunks, ascending; None is all of them.
    """

    document_id: str
    chunk_indexes: tuple[int, ...] | None = None


ContextRef = str | DocumentRef | TextRef
"""What may stand in front of a message: a document by its id, some of its chunks, or a text."""


@dataclass(frozen=True)
class ChatTurn:
    """A message of a user in a conversation.

    Attributes:
        text: The message; it may be empty.
        documents: What stands in front of it, in order.
        reply: What was answered; None for the last message, which is to be answered.
    """

    text: str
    documents: Sequence[ContextRef] = ()
    reply: str | None = None


@dataclass(frozen=True)
class AskOptions:
    """How a question is answered; fields of None take the settings' value.

    Attributes:
        policy: Recompute policy.
        policy_options: Its parameters.
        system: System prompt.
        max_tokens: Largest number of answer tokens.
        sampling: How tokens are drawn.
        on_miss: What to do about a chunk without an entry: ``prefill``, ``error`` or ``skip``.
        verify: Also run the full prefill on the same prompt, and say how close the answer is.
        num_answers: Answers to draw behind one fusion.
        stop: Strings that end an answer, and are not part of it.
        top_logprobs: How many of the likeliest tokens come with each token; None asks for no log
            probabilities.
        json_schema: Answers are JSON of this schema.
        as_question: ``chat`` puts the messages as ``stream`` puts its question: asked to be answered
            in a sentence.
    """

    policy: str | None = None
    policy_options: PolicyOptions = field(default_factory=PolicyOptions)
    system: str | None = None
    max_tokens: int = 64
    sampling: SamplingParams = field(default_factory=SamplingParams)
    on_miss: OnMiss = "prefill"
    verify: bool = False
    num_answers: int = 1
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    json_schema: Mapping[str, Any] | None = None
    as_question: bool = False

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            InvalidValueError: A field is out of range, or two do not go together.
        """
        if self.num_answers < 1:
            raise InvalidValueError("n is less than 1", param="n")
        if self.num_answers > 1 and self.verify:
            raise InvalidValueError("one answer can be verified, not several", param="verify")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidValueError(
                f"{len(self.stop)} stop strings, over {MAX_STOP_STRINGS}", param="stop"
            )
        if not all(0 < len(s) <= MAX_STOP_CHARS for s in self.stop):
            raise InvalidValueError(
                f"a stop string has 1 to {MAX_STOP_CHARS} characters", param="stop"
            )
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidValueError(
                f"top_logprobs is not within 0 and {MAX_TOP_LOGPROBS}", param="top_logprobs"
            )


class PromptPlanner:
    """Plans questions over one tenant's documents.

    Args:
        runtime: Model, store and engine.
        catalog: The tenant's documents.

    Attributes:
        names: Which entries its chunks want.
    """

    def __init__(self, runtime: Runtime, catalog: Catalog) -> None:
        self._runtime = runtime
        self._catalog = catalog
        self.names = EntryNames(runtime, catalog)
        self._loose = LooseTexts(runtime, catalog)

    def plan(
        self, turns: Sequence[ChatTurn], options: AskOptions, style: PromptStyle
    ) -> FusionPlan:
        """What a conversation would run, without any model work; a question is one turn.

        Errors as in ``ChunkCache.stream`` and ``ChunkCache.chat``.
        """
        runtime = self._runtime
        settings = runtime.settings
        num_documents = sum(len(t.documents) for t in turns)
        if num_documents > settings.max_documents_per_request:
            raise InvalidValueError(
                f"{num_documents} documents, over {settings.max_documents_per_request}",
                param="document_ids",
            )
        if options.max_tokens > settings.max_answer_tokens:
            raise InvalidValueError(
                f"max_tokens {options.max_tokens} is over {settings.max_answer_tokens}",
                param="max_tokens",
            )
        policy = make_policy(
            options.policy or settings.policy,
            options.policy_options,
            settings.recompute_ratio,
            settings.target_kl,
        )
        groups, warnings = self._chunk_groups([t.documents for t in turns])
        encode = runtime.model.tokenizer.encode_content
        laid_out = tuple(
            Turn(
                documents,
                encode(_checked_text(turn.text)),
                None if turn.reply is None else encode(_checked_text(turn.reply)),
            )
            for turn, documents in zip(turns, groups, strict=True)
        )
        system_ids = self.system_ids(options.system)
        parts = PromptParts(runtime.model.template, system_ids, laid_out, style)
        plan = self.plan_parts(parts, policy, options)
        runtime.engine.check_fits(plan.layout.num_tokens)
        return replace(plan, warnings=plan.warnings + warnings)

    def plan_parts(self, parts: PromptParts, policy: Policy, options: AskOptions) -> FusionPlan:
        """Plan a prompt whose parts are known.

        Raises:
            InvalidValueError: The policy does not fit the model, or is not calibrated for it.
            StoreError: The store cannot be read.
        """
        runtime = self._runtime
        policy.check(runtime.model.runner.spec.num_layers)
        if isinstance(policy, Auto):
            policy = policy.with_table(auto_table(runtime))
        chunks = parts.chunks
        identities = self.names.identities([c.token_ids for c in chunks], parts.system_ids)
        plan = plan_fusion(
            parts,
            [replace(i, is_loose=c.is_loose) for i, c in zip(identities, chunks, strict=True)],
            policy,
            preparation=str(runtime.preparation),
            reuse_is_lossless=runtime.reuse_is_lossless,
            on_miss=options.on_miss,
            limits=runtime.limits,
        )
        warnings = (*plan.warnings, *_neighbour_warnings(plan), *_calibration_warnings(plan))
        return replace(plan, warnings=warnings)

    def system_ids(self, system: str | None) -> tuple[int, ...]:
        """Token ids of a system prompt; None is the default one."""
        text = self._runtime.system if system is None else system
        model = self._runtime.model
        return model.tokenizer.encode_content(model.template.system_text(text))

    def _chunk_groups(
        self, context: Sequence[Sequence[ContextRef]]
    ) -> tuple[list[tuple[tuple[ChunkRef, ...], ...]], tuple[ReuseWarning, ...]]:
        """Per turn its chunks in prompt order, in stretches of adjacent chunks of one document."""
        wanted = [[DocumentRef(r) if isinstance(r, str) else r for r in refs] for refs in context]
        ids = {r.document_id for refs in wanted for r in refs if isinstance(r, DocumentRef)}
        found = self._catalog.get_many(ids)
        warnings: dict[str, ReuseWarning] = {}
        turns = []
        for refs in wanted:
            groups: list[tuple[ChunkRef, ...]] = []
            for ref in refs:
                if isinstance(ref, TextRef):
                    groups.append(self._loose.chunks(ref))
                    continue
                document = found.get(ref.document_id)
                if document is None:
                    raise DocumentNotFoundError(
                        f"there is no document {ref.document_id!r}", param="document_ids"
                    )
                if document.tokenizer != self._runtime.model.tokenizer.digest:
                    document = found[ref.document_id] = self._cut_again(document)
                    warnings[ref.document_id] = ReuseWarning(
                        "tokenizer_changed",
                        "was cut again: it had been cut with another tokenizer",
                        ref.document_id,
                    )
                groups += _adjacent(document, ref.chunk_indexes)
            turns.append(tuple(groups))
        return turns, tuple(warnings.values())

    def _cut_again(self, document: Document) -> Document:
        runtime = self._runtime
        text_format = format_of_fingerprint(document.chunking)
        cut = replace(
            document,
            chunks=runtime.splitter.split(document.text, self._catalog.namespace, text_format),
            tokenizer=runtime.model.tokenizer.digest,
            chunking=runtime.splitter.fingerprint(text_format),
        )
        if runtime.env.read_only:
            return cut
        stored = self._catalog.put(cut, now=time.time())
        runtime.follow_removals()
        return stored.document


def _neighbour_warnings(plan: FusionPlan) -> tuple[ReuseWarning, ...]:
    """Per document, how many of its chunks are prepared otherwise than the plan says."""
    if not plan.policy.places_entries:
        return ()
    others = Counter(
        segment.chunk.document_id
        for segment, identity in zip(plan.layout.chunks, plan.identities, strict=True)
        if segment.chunk is not None and identity.preparation != plan.preparation
    )
    return tuple(
        ReuseWarning(
            "no_neighbours",
            f"has no neighbours for {num_chunks} of its chunks: until the next pre-caching run "
            "they are prepared behind the preamble",
            document_id,
        )
        for document_id, num_chunks in others.items()
    )


def _calibration_warnings(plan: FusionPlan) -> tuple[ReuseWarning, ...]:
    """Whether a target is asked for of a prompt longer than those that its bound was learned on."""
    policy, num_tokens = plan.policy, plan.layout.num_context_tokens
    if not isinstance(policy, Auto) or policy.table is None:
        return ()
    longest = policy.table.num_context_tokens
    if num_tokens <= longest:
        return ()
    return (
        ReuseWarning(
            "outside_calibration",
            f"{num_tokens} context tokens, over the {longest} that `auto` was calibrated on: its "
            "bound may not hold",
        ),
    )


def _adjacent(
    document: Document, chunk_indexes: tuple[int, ...] | None
) -> list[tuple[ChunkRef, ...]]:
    indexes = range(len(document.chunks)) if chunk_indexes is None else chunk_indexes
    groups: list[list[ChunkRef]] = []
    previous = None
    for index in indexes:
        if not 0 <= index < len(document.chunks):
            raise InvalidValueError(
                f"document {document.document_id!r} has {len(document.chunks)} chunks, no "
                f"chunk {index}",
                param="document_ids",
            )
        if previous is None or index != previous + 1:
            groups.append([])
        chunk = document.chunks[index]
        groups[-1].append(ChunkRef(document.document_id, index, chunk.token_ids))
        previous = index
    return [tuple(g) for g in groups]


def _checked_text(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidValueError("the question is not valid Unicode", param="query") from error
    return text
