"""What caching a corpus would take, found without storing anything.

Documents are read and cut as a run would; the speed is measured on a few of the chunks that are
not cached yet. Neighbours are not looked for: chunks that wait for some count as without.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from chunkcache.documents import canonical_text
from chunkcache.errors import ChunkCacheError, DocumentNotFoundError
from chunkcache.identity import ChunkKey, EntryIdentity
from chunkcache.ingest import DocumentIngest
from chunkcache.precache import Item, StoredDocument
from chunkcache.results import ItemFailure
from chunkcache.splitting import format_of_fingerprint
from chunkcache.text_files import TextFile, TextItem

_MEASURED_CHUNKS = 4


@dataclass(frozen=True)
class PrecacheEstimate:
    """What a run over some items would do.

    Attributes:
        documents: Items with text.
        chunks: Their chunks.
        tokens: Tokens of these.
        new_chunks: Distinct chunks that are not cached yet.
        new_tokens: Their tokens.
        new_bytes: Bytes of their entries in the store, texts and overhead not counted.
        tokens_per_second: How fast a few of them ran through the model; 0 if there are none.
        seconds: How long all of them would take.
        failures: Items that could not be read.
    """

    documents: int
    chunks: int
    tokens: int
    new_chunks: int
    new_tokens: int
    new_bytes: int
    tokens_per_second: float
    seconds: float
    failures: tuple[ItemFailure, ...] = field(default=())


def estimate_precache(
    ingest: DocumentIngest,
    items: Iterable[Item],
    on_item: Callable[[], None] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> PrecacheEstimate:
    """Estimate a run.

    Args:
        ingest: Where documents would go.
        items: What would be cached.
        on_item: Told after each item.
        should_stop: Asked before each; True gives the estimate for what was read so far.

    Raises:
        StoreError: The store cannot be read.
    """
    runtime = ingest.runtime
    failures: list[ItemFailure] = []
    new: set[ChunkKey] = set()
    measured: list[EntryIdentity] = []
    num_documents = num_chunks = num_tokens = num_new_tokens = 0
    for item in items:
        if should_stop():
            break
        if isinstance(item, TextFile):
            item = item.read()
        elif isinstance(item, StoredDocument):
            item = _stored_item(ingest, item.document_id)
        if isinstance(item, ItemFailure):
            failures.append(item)
        else:
            try:
                text = canonical_text(item.text)
                chunks = runtime.splitter.split(text, ingest.catalog.namespace, item.text_format)
            except ChunkCacheError as error:
                failures.append(ItemFailure(item.document_id, error.code, error.message))
                chunks = ()
            num_documents += bool(chunks)
            num_chunks += len(chunks)
            num_tokens += sum(len(c.token_ids) for c in chunks)
            distinct = list(dict.fromkeys(c.token_ids for c in chunks))
            for identity in ingest.names.identities(distinct, ingest.system_ids):
                if identity.key() not in new and not runtime.stack.contains(identity.key()):
                    new.add(identity.key())
                    num_new_tokens += len(identity.token_ids)
                    if len(measured) < _MEASURED_CHUNKS:
                        measured.append(identity)
        on_item()
    rate = _tokens_per_second(ingest, measured)
    spec = runtime.model.runner.spec
    return PrecacheEstimate(
        documents=num_documents,
        chunks=num_chunks,
        tokens=num_tokens,
        new_chunks=len(new),
        new_tokens=num_new_tokens,
        new_bytes=num_new_tokens
        * runtime.codec.bytes_per_token(spec.num_layers, spec.num_kv_heads, spec.head_dim),
        tokens_per_second=rate,
        seconds=num_new_tokens / rate if rate else 0.0,
        failures=tuple(failures),
    )


def _stored_item(ingest: DocumentIngest, document_id: str) -> TextItem | ItemFailure:
    try:
        document = ingest.catalog.require(document_id)
    except DocumentNotFoundError as error:
        return ItemFailure(document_id, error.code, error.message)
    text_format = format_of_fingerprint(document.chunking)
    return TextItem(document_id, document.text, document.metadata, text_format)


def _tokens_per_second(ingest: DocumentIngest, identities: list[EntryIdentity]) -> float:
    """Prefill chunks as the job would, and forget them."""
    if not identities:
        return 0.0
    runtime = ingest.runtime
    # The first one pays for the prefix that the others share.
    warm, *timed = identities if len(identities) > 1 else identities * 2
    runtime.packs.request(warm).result()
    started = time.perf_counter()
    for future in [runtime.packs.request(identity) for identity in timed]:
        future.result()
    return sum(len(i.token_ids) for i in timed) / (time.perf_counter() - started)
