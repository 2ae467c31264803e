"""Checks of entries: that they are whole, and that each goes with every chunk it holds a trace of."""

from collections.abc import Iterator
from dataclasses import dataclass

from chunkcache.catalog_chunks import ChunkRecords
from chunkcache.catalog_neighbours import NeighboursRecord, behind_key
from chunkcache.catalog_records import ChunkRecord, chunk_key
from chunkcache.errors import InvalidValueError
from chunkcache.identity import (
    DIGEST_BYTES,
    ChunkId,
    ChunkKey,
    TenantNamespace,
    chunk_id,
)
from chunkcache.store.disk import quarantine_entry
from chunkcache.store.entry_format import (
    DamagedEntryError,
    EntryHeader,
    check_entry,
    decode_header,
)
from chunkcache.store.records import decoded
from chunkcache.store.tier import MissReason
from chunkcache.store.transaction import Database, Transaction
from chunkcache.upkeep.check_documents import DocumentFacts
from chunkcache.upkeep.findings import Fault, Finding, Mend, OnProgress, drops_entry

_ENTRIES = Database.ENTRIES


@dataclass
class EntryFacts:
    """What was read on the way.

    Attributes:
        num_bytes: Bytes of all entries.
    """

    num_bytes: int = 0


@dataclass(frozen=True)
class Traces:
    """The chunks that an entry must go with.

    Attributes:
        owners: Its own chunk, once for each tokenizer under which documents hold it.
        behind: Chunks that it was prepared behind.
        is_known: Whether it is on record what it was prepared behind, if it was behind others.
    """

    owners: tuple[ChunkId, ...]
    behind: tuple[ChunkId, ...]
    is_known: bool


def check_entries(
    txn: Transaction,
    documents: DocumentFacts,
    facts: EntryFacts,
    on_progress: OnProgress,
    *,
    reads_payloads: bool,
) -> Iterator[Finding]:
    """Check every entry.

    Args:
        txn: A transaction; nothing is changed in it.
        documents: What the documents say.
        facts: Filled in on the way.
        on_progress: Told how far it is.
        reads_payloads: Compare checksums of all bytes, not of the headers alone.
    """
    num_entries = txn.num_entries(_ENTRIES)
    for number, (key, value) in enumerate(txn.scan(_ENTRIES)):
        on_progress("entries", number, num_entries)
        facts.num_bytes += len(value)
        try:
            if reads_payloads:
                check_entry(value, ChunkKey(key))
            header = decode_header(value)
            traces = traces_of(txn, header, documents)
        except DamagedEntryError as error:
            yield Finding(
                Fault.DAMAGED_ENTRY,
                key.hex(),
                f"{error.reason.value}; it goes to the quarantine and is computed again",
                _quarantines(key, error.reason),
            )
        else:
            yield from _check_links(txn, ChunkKey(key), header, traces)


def traces_of(txn: Transaction, header: EntryHeader, documents: DocumentFacts) -> Traces:
    """The chunks that an entry must go with.

    Raises:
        DamagedEntryError: Its token ids are not well formed.
    """
    namespace = TenantNamespace(header.namespace)
    try:
        token_ids = header.identity().token_ids
    except InvalidValueError as error:
        raise DamagedEntryError(MissReason.CORRUPT_HEADER) from error
    candidates = (chunk_id(namespace, t, token_ids) for t in sorted(documents.tokenizers))
    owners = tuple(c for c in candidates if chunk_key(namespace, c) in documents.references)
    is_behind = header.preparation.startswith("neighbours")
    behind: list[ChunkId] = []
    for owner in owners if is_behind else ():
        key = behind_key(namespace, owner, header.preparation.encode())
        data = txn.get(Database.CHUNKS, key)
        record = None if data is None else decoded(data, NeighboursRecord)
        behind += [ChunkId(n.chunk_id) for n in record.neighbours] if record else []
    return Traces(owners, tuple(dict.fromkeys(behind)), bool(behind) or not is_behind)


def is_foreign(txn: Transaction, key: bytes, entry_key: bytes, documents: DocumentFacts) -> bool:
    """Whether a chunk names a sound entry that holds no trace of it.

    Args:
        txn: A transaction.
        key: The chunk's key.
        entry_key: The entry that it names.
        documents: What the documents say.
    """
    value = txn.get(_ENTRIES, entry_key)
    if value is None:
        return False
    try:
        header = decode_header(value)
        traces = traces_of(txn, header, documents)
    except DamagedEntryError:
        return False
    if header.identity().key() != entry_key:
        return False  # a damaged entry, which is found for itself
    if header.namespace != key[:DIGEST_BYTES]:
        return True
    chunk = key[DIGEST_BYTES:]
    return traces.is_known and chunk not in (*traces.owners, *traces.behind)


def _check_links(
    txn: Transaction, key: ChunkKey, header: EntryHeader, traces: Traces
) -> Iterator[Finding]:
    namespace = TenantNamespace(header.namespace)
    if not traces.owners:
        yield Finding(
            Fault.UNREFERENCED_ENTRY,
            key.hex(),
            "no chunk has these tokens; it is dropped",
            drops_entry(key),
        )
    elif not traces.is_known:
        yield Finding(
            Fault.UNTRACED_ENTRY,
            key.hex(),
            "it is not on record which chunks it was prepared behind; it is dropped",
            drops_entry(key),
        )
    else:
        # Its own chunk may be known under several tokenizers: one of them has to name it.
        named = {c: _entry_keys(txn, namespace, c) for c in (*traces.owners, *traces.behind)}
        if None in named.values():
            return  # a chunk without a sound record is found for itself
        owning = [c for c in traces.owners if key in (named[c] or ())]
        wanted = (*(owning or traces.owners[:1]), *traces.behind)
        if not all(key in (named[c] or ()) for c in wanted):
            yield Finding(
                Fault.UNLINKED_ENTRY,
                key.hex(),
                "a chunk that it holds a trace of does not name it; it does from now on",
                lambda txn: ChunkRecords(namespace).link_entry(txn, key, wanted),
            )


def _entry_keys(
    txn: Transaction, namespace: TenantNamespace, chunk: ChunkId
) -> tuple[bytes, ...] | None:
    """The entries that a chunk names; None where its record is missing or damaged."""
    data = txn.get(Database.CHUNKS, chunk_key(namespace, chunk))
    record = None if data is None else decoded(data, ChunkRecord)
    return None if record is None else record.entry_keys


def _quarantines(key: bytes, reason: MissReason) -> Mend:
    def mend(txn: Transaction) -> None:
        value = txn.get(_ENTRIES, key)
        if value is not None:
            quarantine_entry(txn, key, value, reason)

    return mend
