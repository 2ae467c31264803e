"""What of documents and texts is cached, in which tier; nothing is loaded, nothing is run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from chunkcache.loose_text import LooseTexts, TextRef
from chunkcache.serving_model import ServingModel
from chunkcache.store.lease import Source


@dataclass(frozen=True)
class CacheState:
    """How much of a document, or a text, a prompt would find.

    Attributes:
        num_chunks: Its distinct chunks.
        num_tokens: Their tokens.
        chunks_by_tier: Those with an entry, by the nearest tier that has it.
        tokens_by_tier: Their tokens.
    """

    num_chunks: int
    num_tokens: int
    chunks_by_tier: Counter[Source] = field(default_factory=Counter)
    tokens_by_tier: Counter[Source] = field(default_factory=Counter)

    @property
    def is_cached(self) -> bool:
        """Whether nothing of it would have to be prefilled."""
        return self.chunks_by_tier.total() == self.num_chunks


def look_up_documents(serving: ServingModel, document_ids: Sequence[str]) -> dict[str, CacheState]:
    """The state of those of the documents that exist.

    One that another tokenizer cut has nothing cached for the model that serves.
    """
    tokenizer = serving.runtime.model.tokenizer.digest
    return {
        document.document_id: _state(
            serving,
            [c.token_ids for c in document.chunks],
            is_usable=document.tokenizer == tokenizer,
        )
        for document in serving.ingest.catalog.get_many(document_ids).values()
    }


def look_up_text(serving: ServingModel, text: TextRef) -> CacheState:
    """The state of a text in front of a message, matched by its content.

    Raises:
        InvalidValueError: The text is not valid Unicode.
        EmptyDocumentError: There is nothing in it.
    """
    chunks = LooseTexts(serving.runtime, serving.ingest.catalog).chunks(text)
    return _state(serving, [c.token_ids for c in chunks], is_usable=True)


def _state(
    serving: ServingModel, chunks: Sequence[tuple[int, ...]], *, is_usable: bool
) -> CacheState:
    ingest, stack = serving.ingest, serving.runtime.stack
    distinct = list(dict.fromkeys(chunks))
    state = CacheState(len(distinct), sum(map(len, distinct)))
    for identity in ingest.names.identities(distinct, ingest.system_ids) if is_usable else ():
        tier = stack.tier_of(identity.key())
        if tier is not None:
            state.chunks_by_tier[tier] += 1
            state.tokens_by_tier[tier] += len(identity.token_ids)
    return state
