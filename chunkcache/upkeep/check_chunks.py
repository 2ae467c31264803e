"""Checks of chunks: who holds them, which entries they name, and what they are prepared behind."""

from collections.abc import Iterator

from chunkcache.catalog_neighbours import (
    BEHIND,
    REVERSE,
    NeighboursRecord,
    behind_key,
    reverse_key,
)
from chunkcache.catalog_records import ChunkRecord, chunk_key
from chunkcache.errors import InvalidValueError
from chunkcache.identity import DIGEST_BYTES, ChunkId, TenantNamespace, chunk_id, decode_token_ids
from chunkcache.store.records import decoded, encode_record
from chunkcache.store.transaction import Database, Transaction
from chunkcache.upkeep.check_documents import DocumentFacts
from chunkcache.upkeep.check_entries import is_foreign
from chunkcache.upkeep.findings import Fault, Finding, Mend, OnProgress, deletes

_CHUNKS = Database.CHUNKS
_KEY_BYTES = 2 * DIGEST_BYTES


def check_chunks(
    txn: Transaction, facts: DocumentFacts, on_progress: OnProgress
) -> Iterator[Finding]:
    """Check every record of the chunks' database, and that each chunk of a document has one."""
    num_keys = txn.num_entries(_CHUNKS)
    for number, (key, data) in enumerate(txn.scan(_CHUNKS)):
        on_progress("chunks", number, num_keys)
        namespace, chunk = TenantNamespace(key[:DIGEST_BYTES]), ChunkId(key[DIGEST_BYTES:][:32])
        kind, rest = key[_KEY_BYTES : _KEY_BYTES + 1], key[_KEY_BYTES + 1 :]
        if len(key) == _KEY_BYTES:
            yield from _check_chunk(txn, key, data, facts)
        elif kind == BEHIND and rest:
            yield from _check_behind(txn, namespace, chunk, rest, data, facts)
        elif kind == REVERSE and len(rest) > DIGEST_BYTES:
            yield from _check_reverse(txn, namespace, chunk, rest, key)
        else:
            yield Finding(
                Fault.UNKNOWN_RECORD, key.hex(), "no record has such a key", deletes(_CHUNKS, key)
            )
    for key, num_documents in facts.references.items():
        if txn.get(_CHUNKS, key) is None:
            yield Finding(
                Fault.MISSING_CHUNK,
                key[DIGEST_BYTES:].hex(),
                f"{num_documents} documents hold a chunk without a record; it gets one",
                _puts(key, ChunkRecord(num_documents=num_documents)),
            )


def _check_chunk(
    txn: Transaction, key: bytes, data: memoryview, facts: DocumentFacts
) -> Iterator[Finding]:
    name, num_documents = key[DIGEST_BYTES:].hex(), facts.references[key]
    record = decoded(data, ChunkRecord)
    if not num_documents:
        yield Finding(
            Fault.UNREFERENCED_CHUNK,
            name,
            "no document holds the chunk; it is dropped with its entries",
            deletes(_CHUNKS, key),
        )
        return
    if record is None:
        yield Finding(
            Fault.DAMAGED_CHUNK,
            name,
            "the record of a chunk is damaged; it is made anew",
            _puts(key, ChunkRecord(num_documents=num_documents)),
        )
        return
    gone = [k for k in record.entry_keys if txn.get(Database.ENTRIES, k) is None]
    gone = [k for k in gone if txn.get(Database.QUARANTINE, k) is None]
    foreign = [k for k in record.entry_keys if is_foreign(txn, key, k, facts)]
    right = ChunkRecord(
        num_documents=num_documents,
        entry_keys=tuple(k for k in record.entry_keys if k not in gone and k not in foreign),
    )
    if record.num_documents != num_documents:
        yield Finding(
            Fault.WRONG_REFERENCES,
            name,
            f"the chunk counts {record.num_documents} documents, {num_documents} hold it",
            _puts(key, right),
        )
    for entry_key in foreign:
        yield Finding(
            Fault.FOREIGN_LINK,
            entry_key.hex(),
            f"the entry would go with chunk {name}, of which it holds no trace",
            _puts(key, right),
        )
    for entry_key in gone:
        yield Finding(
            Fault.DANGLING_LINK,
            entry_key.hex(),
            "a chunk names an entry that is gone",
            _puts(key, right),
        )


def _check_behind(
    txn: Transaction,
    namespace: TenantNamespace,
    chunk: ChunkId,
    name: bytes,
    data: memoryview,
    facts: DocumentFacts,
) -> Iterator[Finding]:
    """Check what a chunk is prepared behind: all of it is there, and refers back."""
    record = decoded(data, NeighboursRecord)
    neighbours = [] if record is None else [ChunkId(n.chunk_id) for n in record.neighbours]
    reason = None
    if record is None or not neighbours:
        reason = "is damaged"
    elif any(chunk_key(namespace, c) not in facts.references for c in (chunk, *neighbours)):
        reason = "speaks of a chunk that is gone"
    elif any(txn.get(_CHUNKS, reverse_key(namespace, n, chunk, name)) is None for n in neighbours):
        reason = "is not referred back to"
    elif not all(_holds(namespace, n.chunk_id, n.token_ids, facts) for n in record.neighbours):
        reason = "holds other tokens than its chunks"
    if reason is not None:
        yield Finding(
            Fault.BROKEN_NEIGHBOURS,
            chunk.hex(),
            f"a record of neighbours {reason}; it is dropped, and the chunk gets others",
            deletes(_CHUNKS, behind_key(namespace, chunk, name)),
        )


def _check_reverse(
    txn: Transaction, namespace: TenantNamespace, chunk: ChunkId, rest: bytes, key: bytes
) -> Iterator[Finding]:
    other, name = ChunkId(rest[:DIGEST_BYTES]), rest[DIGEST_BYTES:]
    data = txn.get(_CHUNKS, behind_key(namespace, other, name))
    record = None if data is None else decoded(data, NeighboursRecord)
    if record is None or all(n.chunk_id != chunk for n in record.neighbours):
        yield Finding(
            Fault.BROKEN_NEIGHBOURS,
            chunk.hex(),
            "a reference back to a record of neighbours leads nowhere; it is dropped",
            deletes(_CHUNKS, key),
        )


def _holds(
    namespace: TenantNamespace, chunk: bytes, token_ids: bytes, facts: DocumentFacts
) -> bool:
    try:
        ids = decode_token_ids(token_ids)
    except InvalidValueError:
        return False
    return any(chunk_id(namespace, t, ids) == chunk for t in facts.tokenizers)


def _puts(key: bytes, record: ChunkRecord) -> Mend:
    return lambda txn: txn.put(_CHUNKS, key, encode_record(record))
