"""From a question and documents to a plan: chunks looked up, prompt laid out, policy chosen."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from chunkcache.catalog import Catalog
from chunkcache.documents import Document
from chunkcache.engine.sampling import SamplingParams
from chunkcache.entry_naming import EntryNames
from chunkcache.errors import DocumentNotFoundError, InvalidValueError
from chunkcache.fusion.layout import ChunkRef
from chunkcache.fusion.plan import FusionPlan, OnMiss, PromptParts, plan_fusion
from chunkcache.fusion.policies.registry import PolicyOptions, make_policy
from chunkcache.fusion.policy import Policy
from chunkcache.results import ReuseWarning
from chunkcache.runtime import Runtime
from chunkcache.splitting import format_of_fingerprint


@dataclass(frozen=True)
class DocumentRef:
    """A document in a question, or some of its chunks.

    Attributes:
        document_id: The document.
        chunk_indexes: Which of its chunks, ascending; None is all of them.
    """

    document_id: str
    chunk_indexes: tuple[int, ...] | None = None


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
    """

    policy: str | None = None
    policy_options: PolicyOptions = field(default_factory=PolicyOptions)
    system: str | None = None
    max_tokens: int = 64
    sampling: SamplingParams = field(default_factory=SamplingParams)
    on_miss: OnMiss = "prefill"
    verify: bool = False


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

    def plan(
        self, question: str, documents: Sequence[str | DocumentRef], options: AskOptions
    ) -> FusionPlan:
        """What a question would run, without any model work. Errors as in ``ChunkCache.stream``."""
        runtime = self._runtime
        settings = runtime.settings
        if len(documents) > settings.max_documents_per_request:
            raise InvalidValueError(
                f"{len(documents)} documents, over {settings.max_documents_per_request}",
                param="document_ids",
            )
        if options.max_tokens > settings.max_answer_tokens:
            raise InvalidValueError(
                f"max_tokens {options.max_tokens} is over {settings.max_answer_tokens}",
                param="max_tokens",
            )
        policy = make_policy(
            options.policy or settings.policy, options.policy_options, settings.recompute_ratio
        )
        system_ids = self.system_ids(options.system)
        groups, warnings = self._chunk_groups(documents)
        parts = PromptParts(
            runtime.model.template,
            system_ids,
            groups,
            runtime.model.tokenizer.encode_content(_checked_question(question)),
        )
        plan = self.plan_parts(parts, policy, options)
        runtime.engine.check_fits(plan.layout.num_tokens)
        return replace(plan, warnings=plan.warnings + warnings)

    def plan_parts(self, parts: PromptParts, policy: Policy, options: AskOptions) -> FusionPlan:
        """Plan a prompt whose parts are known.

        Raises:
            InvalidValueError: The policy does not fit the model.
        """
        runtime = self._runtime
        policy.check(runtime.model.runner.spec.num_layers)
        chunks = [c.token_ids for g in parts.documents for c in g]
        plan = plan_fusion(
            parts,
            self.names.identities(chunks, parts.system_ids),
            policy,
            preparation=str(runtime.preparation),
            reuse_is_lossless=runtime.reuse_is_lossless,
            on_miss=options.on_miss,
            limits=runtime.limits,
        )
        return replace(plan, warnings=plan.warnings + _neighbour_warnings(plan))

    def system_ids(self, system: str | None) -> tuple[int, ...]:
        """Token ids of a system prompt; None is the default one."""
        text = self._runtime.system if system is None else system
        return self._runtime.model.tokenizer.encode_content(text)

    def _chunk_groups(
        self, documents: Sequence[str | DocumentRef]
    ) -> tuple[tuple[tuple[ChunkRef, ...], ...], tuple[ReuseWarning, ...]]:
        """Chunks in prompt order; each group is a stretch of adjacent chunks of one document."""
        refs = [DocumentRef(d) if isinstance(d, str) else d for d in documents]
        found = self._catalog.get_many({r.document_id for r in refs})
        warnings: dict[str, ReuseWarning] = {}
        groups: list[tuple[ChunkRef, ...]] = []
        for ref in refs:
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
        return tuple(groups), tuple(warnings.values())

    def _cut_again(self, document: Document) -> Document:
        runtime = self._runtime
        text_format = format_of_fingerprint(document.chunking)
        stored = self._catalog.put(
            replace(
                document,
                chunks=runtime.splitter.split(document.text, self._catalog.namespace, text_format),
                tokenizer=runtime.model.tokenizer.digest,
                chunking=runtime.splitter.fingerprint(text_format),
            ),
            now=time.time(),
        )
        runtime.stack.forget(stored.removed.entry_keys)
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


def _checked_question(question: str) -> str:
    try:
        question.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidValueError("the question is not valid Unicode", param="query") from error
    return question
