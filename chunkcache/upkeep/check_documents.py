"""Checks of documents: records, texts, counters and times of expiry, and which chunks they hold."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from blake3 import blake3
from msgspec.structs import replace

from chunkcache.catalog_counters import TenantCounters
from chunkcache.catalog_expiry import expiry_key, expiry_prefix, noted_time, put_expiry
from chunkcache.catalog_records import (
    CounterRecord,
    InfoRecord,
    TextRecord,
    chunk_key,
    counter_key,
    info_key,
    info_prefix,
)
from chunkcache.collection_values import CollectionRecord, collection_key
from chunkcache.identity import DIGEST_BYTES, ChunkId, TenantNamespace, TokenizerDigest
from chunkcache.quota import DocumentSize
from chunkcache.store.records import decoded, encode_record
from chunkcache.store.transaction import Database, Transaction
from chunkcache.upkeep.document_records import disagreement, restored_record
from chunkcache.upkeep.findings import Fault, Finding, Mend, OnProgress, deletes

_DOCUMENTS = Database.DOCUMENTS
_EXPIRY_NOTE_BYTES = 8 + DIGEST_BYTES


@dataclass
class DocumentFacts:
    """What the sound documents say about everything else.

    Attributes:
        num_documents: Documents, damaged ones included.
        references: By a chunk's key, how many documents hold it.
        tokenizers: Which tokenizers cut documents.
    """

    num_documents: int = 0
    references: Counter[bytes] = field(default_factory=Counter)
    tokenizers: set[TokenizerDigest] = field(default_factory=set)


@dataclass
class _Counted:
    """A tenant's documents, counted one by one.

    Attributes:
        num_documents: Damaged ones included.
        num_sound: Those whose records are whole and agree.
        size: What the sound ones take.
    """

    num_documents: int = 0
    num_sound: int = 0
    size: DocumentSize = field(default_factory=DocumentSize)

    def agrees_with(self, counter: CounterRecord) -> bool:
        """Whether counters are right, as far as that can be told while a document is damaged."""
        is_size_known = self.num_sound == self.num_documents
        return counter.num_documents == self.num_documents and (
            not is_size_known or counter.size == self.size
        )


def check_documents(
    txn: Transaction, facts: DocumentFacts, on_progress: OnProgress
) -> Iterator[Finding]:
    """Check every record of the documents' database.

    Args:
        txn: A transaction; nothing is changed in it.
        facts: Filled in on the way.
        on_progress: Told how far it is.
    """
    info_digests = _first_pass(txn, facts)
    num_keys = txn.num_entries(_DOCUMENTS)
    counted: defaultdict[TenantNamespace, _Counted] = defaultdict(_Counted)
    for number, (key, data) in enumerate(txn.scan(_DOCUMENTS)):
        on_progress("documents", number, num_keys)
        namespace = TenantNamespace(key[:DIGEST_BYTES])
        kind, rest = key[DIGEST_BYTES : DIGEST_BYTES + 1], key[DIGEST_BYTES + 1 :]
        if kind == b"I" and len(rest) > DIGEST_BYTES:
            facts.num_documents += 1
            counted[namespace].num_documents += 1
            yield from _check_document(txn, namespace, key, data, facts, counted[namespace])
        elif kind == b"T" and len(rest) == DIGEST_BYTES:
            if namespace + rest not in info_digests:
                yield Finding(
                    Fault.ORPHAN_TEXT,
                    rest.hex(),
                    "a text belongs to no document; it is dropped",
                    deletes(_DOCUMENTS, key),
                )
        elif kind == b"L" and len(rest) == DIGEST_BYTES:
            record = decoded(data, CollectionRecord)
            if record is None or collection_key(namespace, record.collection_id) != key:
                yield Finding(
                    Fault.DAMAGED_COLLECTION,
                    rest.hex(),
                    "a collection's record is damaged; the collection is dropped, its documents stay",
                    deletes(_DOCUMENTS, key),
                )
        elif kind == b"E" and len(rest) == _EXPIRY_NOTE_BYTES:
            yield from _check_note(txn, namespace, key, bytes(data))
        elif kind != b"C" or rest:
            yield Finding(
                Fault.UNKNOWN_RECORD,
                key.hex(),
                "no record has such a key",
                deletes(_DOCUMENTS, key),
            )
    for namespace in _namespaces(txn):
        yield from _check_counters(txn, namespace, counted[namespace])


def _first_pass(txn: Transaction, facts: DocumentFacts) -> set[bytes]:
    """Collect tokenizers; gives what stands for the documents' ids in keys."""
    digests = set()
    for key, data in txn.scan(_DOCUMENTS):
        if key[DIGEST_BYTES : DIGEST_BYTES + 1] == b"I":
            digests.add(key[:DIGEST_BYTES] + key[-DIGEST_BYTES:])
            info = decoded(data, InfoRecord)
            if info is not None:
                facts.tokenizers.add(TokenizerDigest(info.tokenizer))
    return digests


def _namespaces(txn: Transaction) -> list[TenantNamespace]:
    """Those of every key that is long enough to have one."""
    keys = (key for key, _ in txn.scan(_DOCUMENTS) if len(key) > DIGEST_BYTES)
    return list(dict.fromkeys(TenantNamespace(key[:DIGEST_BYTES]) for key in keys))


def _check_document(
    txn: Transaction,
    namespace: TenantNamespace,
    key: bytes,
    data: memoryview,
    facts: DocumentFacts,
    counted: _Counted,
) -> Iterator[Finding]:
    own_text_key = namespace + b"T" + key[-DIGEST_BYTES:]
    text_data = txn.get(_DOCUMENTS, own_text_key)
    text = None if text_data is None else decoded(text_data, TextRecord)
    info = decoded(data, InfoRecord)
    if info is None:
        name = _id_in_key(namespace, key)
        if text is not None and name is not None:
            info = restored_record(namespace, name, text, facts.tokenizers)
        if text is None or info is None:
            yield _dropped(name or _shown(namespace, key), "its record is damaged", key)
            return
        yield Finding(
            Fault.DAMAGED_DOCUMENT,
            info.document_id,
            "its record is damaged; it is restored from its text, as version 1 and without its "
            "metadata",
            _restores(namespace, key, info),
        )
    elif info_key(namespace, info.document_id) != key:
        yield _dropped(info.document_id, "it is filed under another document's key", key)
        return
    elif text is None:
        reason = "its text is missing" if text_data is None else "its text is damaged"
        yield _dropped(info.document_id, reason, key)
        return
    elif reason := disagreement(namespace, info, text):
        yield _dropped(info.document_id, reason, key)
        return
    else:
        counted.num_sound += 1
        counted.size += TenantCounters(namespace, None).size_of(txn, info)
        yield from _check_expiry(txn, namespace, info)
    for held in {c.chunk_id for c in text.chunks}:
        facts.references[chunk_key(namespace, ChunkId(held))] += 1


def _dropped(document_id: str, reason: str, key: bytes) -> Finding:
    return Finding(
        Fault.DAMAGED_DOCUMENT,
        document_id,
        f"{reason}; the document is dropped: store it again",
        deletes(_DOCUMENTS, key, key[:DIGEST_BYTES] + b"T" + key[-DIGEST_BYTES:]),
    )


def _restores(namespace: TenantNamespace, key: bytes, info: InfoRecord) -> Mend:
    """Puts a record, with the time of expiry that is noted elsewhere; indexes are to look again."""

    def mend(txn: Transaction) -> None:
        whole = info
        for note, data in txn.scan(_DOCUMENTS, expiry_prefix(namespace)):
            if bytes(data) == info.document_id.encode():
                whole = replace(info, expires_at=noted_time(note))
        txn.put(_DOCUMENTS, key, encode_record(whole))
        _advance(txn, namespace)

    return mend


def _advance(txn: Transaction, namespace: TenantNamespace) -> None:
    """Make a generation that no derived index has seen, unless counters are to be made anew."""
    data = txn.get(_DOCUMENTS, counter_key(namespace))
    counter = None if data is None else decoded(data, CounterRecord)
    if counter is not None:
        grown = replace(counter, generation=counter.generation + 1)
        txn.put(_DOCUMENTS, counter_key(namespace), encode_record(grown))


def _check_expiry(
    txn: Transaction, namespace: TenantNamespace, info: InfoRecord
) -> Iterator[Finding]:
    if info.expires_at is None:
        return
    name, expires_at = info.document_id, info.expires_at
    noted = txn.get(_DOCUMENTS, expiry_key(namespace, expires_at, name))
    if noted is None or bytes(noted) != name.encode():
        yield Finding(
            Fault.WRONG_EXPIRY,
            name,
            "it is not noted when it expires",
            lambda txn: put_expiry(txn, namespace, expires_at, name),
        )


def _check_note(
    txn: Transaction, namespace: TenantNamespace, key: bytes, name: bytes
) -> Iterator[Finding]:
    """Check that a note of an expiry belongs to a document; a damaged record may still need it."""
    info = None
    if blake3(name).digest() == key[-DIGEST_BYTES:]:
        data = txn.get(_DOCUMENTS, info_key(namespace, name.decode()))
        if data is not None:
            info = decoded(data, InfoRecord)
            if info is None:
                return
    if info is None or info.expires_at != noted_time(key):
        yield Finding(
            Fault.WRONG_EXPIRY,
            name.decode(errors="replace"),
            "an expiry is noted that no document has",
            _unnotes(namespace, key),
        )


def _unnotes(namespace: TenantNamespace, key: bytes) -> Mend:
    """Removes a note; once its time is over it counts as a change, which must not be taken back."""

    def mend(txn: Transaction) -> None:
        txn.delete(_DOCUMENTS, key)
        _advance(txn, namespace)

    return mend


def _check_counters(
    txn: Transaction, namespace: TenantNamespace, counted: _Counted
) -> Iterator[Finding]:
    data = txn.get(_DOCUMENTS, counter_key(namespace))
    counter = None if data is None else decoded(data, CounterRecord)
    if counter is not None and counted.agrees_with(counter):
        return
    # A generation that no derived index has seen yet.
    generation = time.time_ns() // 1_000_000 if counter is None else counter.generation + 1
    record = CounterRecord(
        generation=generation,
        num_documents=counted.num_documents,
        num_tokens=counted.size.num_tokens,
        record_bytes=counted.size.record_bytes,
    )
    yield Finding(
        Fault.WRONG_COUNTERS,
        namespace.hex(),
        f"a tenant's counters are wrong; it has {counted.num_documents} documents",
        lambda txn: txn.put(_DOCUMENTS, counter_key(namespace), encode_record(record)),
    )


def _id_in_key(namespace: TenantNamespace, key: bytes) -> str | None:
    """The document's id, where a key holds it whole."""
    name = _name_bytes(namespace, key)
    return name.decode() if blake3(name).digest() == key[-DIGEST_BYTES:] else None


def _shown(namespace: TenantNamespace, key: bytes) -> str:
    return _name_bytes(namespace, key).decode(errors="ignore") + "..."


def _name_bytes(namespace: TenantNamespace, key: bytes) -> bytes:
    return key[len(info_prefix(namespace)) : -DIGEST_BYTES - 1]
