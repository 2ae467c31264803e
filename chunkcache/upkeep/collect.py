"""``gc``: what nothing needs any more is removed, in one transaction.

Expired documents go with everything behind them, as if they had been deleted; then what no
document holds; then, if asked for, the entries of models that are no longer in use.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from chunkcache.catalog import Catalog
from chunkcache.catalog_records import ChunkRecord
from chunkcache.errors import InvalidValueError, StoreFormatError
from chunkcache.identity import DIGEST_BYTES, ChunkKey, TenantNamespace
from chunkcache.store.disk import delete_entry
from chunkcache.store.entry_format import DamagedEntryError, decode_header
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.records import decoded, encode_record
from chunkcache.store.removals import note_removal
from chunkcache.store.transaction import Database, Transaction
from chunkcache.upkeep.verify import MAX_ROUNDS, examine

MIN_DIGEST_CHARS = 8
_CHUNK_KEY_BYTES = 2 * DIGEST_BYTES


@dataclass(frozen=True)
class ModelUse:
    """The entries of one model.

    Attributes:
        model: Its digest in hex.
        entries: How many there are.
        num_bytes: Their bytes.
        dropped: Whether they were removed.
    """

    model: str
    entries: int
    num_bytes: int
    dropped: bool


@dataclass(frozen=True)
class CollectReport:
    """What was removed, or would be.

    Attributes:
        dry_run: Whether all of it is still there.
        expired_documents: Documents that had expired.
        chunks: Chunks that no document held, those of expired documents included.
        entries: Entries, of whatever reason.
        vectors: Embeddings.
        quarantined: Remains of damaged entries.
        models: Every model with entries, before the collection.
        freed_bytes: Pages given back, in bytes; they are used again before the file grows.
        live_bytes: Pages in use afterwards.
        file_bytes: Size of the data file, which does not shrink.
        entry_keys: What to forget in RAM.
    """

    dry_run: bool
    expired_documents: int
    chunks: int
    entries: int
    vectors: int
    quarantined: int
    models: tuple[ModelUse, ...]
    freed_bytes: int
    live_bytes: int
    file_bytes: int
    entry_keys: tuple[ChunkKey, ...]


class _DryRunDone(Exception):
    """Ends a transaction that is not to be kept."""

    def __init__(self, report: CollectReport) -> None:
        super().__init__()
        self.report = report


def collect(
    env: StoreEnvironment,
    *,
    drop_models: Collection[str] = (),
    dry_run: bool = False,
    clock: Callable[[], float] = time.time,
) -> CollectReport:
    """Remove what nothing needs.

    Args:
        env: The store.
        drop_models: Digests in hex, or their beginnings, of models whose entries go.
        dry_run: Do it, say what it would have done, and keep nothing of it.
        clock: Unix seconds now.

    Raises:
        InvalidValueError: A digest names no model or several, or is too short to be meant.
        StoreFormatError: Something is damaged, so that it is not known what refers to what.
        StoreReadOnlyError: The store was opened for reading alone.
        StoreError: The store failed; nothing was removed.
    """

    def body(txn: Transaction) -> CollectReport:
        report = _collected(env, txn, drop_models, dry_run=dry_run, now=now)
        if dry_run:
            raise _DryRunDone(report)
        return report

    now = clock()
    try:
        return env.update(body, frees=True)
    except _DryRunDone as done:
        return done.report


def _collected(
    env: StoreEnvironment,
    txn: Transaction,
    drop_models: Collection[str],
    *,
    dry_run: bool,
    now: float,
) -> CollectReport:
    bytes_before = txn.live_bytes()
    entries_before, named_before = _entry_keys(txn), _named_keys(txn)
    counted = (Database.VECTORS, Database.QUARANTINE)
    before = Counter({d: txn.num_entries(d) for d in counted})
    num_chunks = _num_chunks(txn)
    uses = _models(txn)
    dropped = _chosen(uses, drop_models)
    num_expired = 0
    for namespace in {TenantNamespace(k[:DIGEST_BYTES]) for k, _ in txn.scan(Database.DOCUMENTS)}:
        catalog = Catalog(env, namespace)
        num_expired += len(catalog.delete_expired_in(txn, now))
    _drop_models(txn, dropped)
    _drop_unreferenced(txn)
    entries, named = _entry_keys(txn), _named_keys(txn)
    # RAM may hold an entry that the disk has lost: it goes with what named it.
    gone = {ChunkKey(k) for k in (entries_before | named_before) - entries - named}
    note_removal(txn, None, gone)
    return CollectReport(
        dry_run=dry_run,
        expired_documents=num_expired,
        chunks=num_chunks - _num_chunks(txn),
        entries=len(entries_before - entries),
        vectors=before[Database.VECTORS] - txn.num_entries(Database.VECTORS),
        quarantined=before[Database.QUARANTINE] - txn.num_entries(Database.QUARANTINE),
        models=tuple(
            ModelUse(model.hex(), use[0], use[1], model in dropped)
            for model, use in sorted(uses.items())
        ),
        freed_bytes=max(0, bytes_before - txn.live_bytes()),
        live_bytes=bytes_before if dry_run else txn.live_bytes(),
        file_bytes=env.file_bytes,
        entry_keys=tuple(sorted(gone)),
    )


def _models(txn: Transaction) -> dict[bytes, tuple[int, int]]:
    """By model, entries and their bytes; what cannot be read is left to ``verify``."""
    uses: dict[bytes, tuple[int, int]] = {}
    for _, value in txn.scan(Database.ENTRIES):
        model = _model(value)
        if model is not None:
            num_entries, num_bytes = uses.get(model, (0, 0))
            uses[model] = (num_entries + 1, num_bytes + len(value))
    return uses


def _model(value: memoryview) -> bytes | None:
    try:
        return decode_header(value).model
    except DamagedEntryError:
        return None


def _chosen(uses: Mapping[bytes, tuple[int, int]], digests: Collection[str]) -> set[bytes]:
    chosen = set()
    for digest in digests:
        if len(digest) < MIN_DIGEST_CHARS:
            raise InvalidValueError(
                f"model digest {digest!r} has fewer than {MIN_DIGEST_CHARS} characters",
                param="drop_model",
            )
        found = [model for model in uses if model.hex().startswith(digest.lower())]
        if len(found) != 1:
            raise InvalidValueError(
                f"{len(found)} models with entries have a digest that begins with {digest!r}",
                param="drop_model",
            )
        chosen.add(found[0])
    return chosen


def _drop_models(txn: Transaction, models: set[bytes]) -> None:
    if not models:
        return
    gone = [k for k, value in txn.scan(Database.ENTRIES) if _model(value) in models]
    for key in gone:
        delete_entry(txn, ChunkKey(key))
    _unname(txn, set(gone))


def _entry_keys(txn: Transaction) -> set[bytes]:
    return {key for key, _ in txn.scan(Database.ENTRIES)}


def _named_keys(txn: Transaction) -> set[bytes]:
    """Entries that chunks name, whether they are there or not."""
    named: set[bytes] = set()
    for key, data in txn.scan(Database.CHUNKS):
        record = decoded(data, ChunkRecord) if len(key) == _CHUNK_KEY_BYTES else None
        named.update(record.entry_keys if record else ())
    return named


def _unname(txn: Transaction, keys: set[bytes]) -> None:
    """Take entries off the lists of what goes with a chunk."""
    changed = []
    for key, data in txn.scan(Database.CHUNKS):
        record = decoded(data, ChunkRecord) if len(key) == _CHUNK_KEY_BYTES else None
        if record is not None and not keys.isdisjoint(record.entry_keys):
            kept = tuple(k for k in record.entry_keys if k not in keys)
            changed.append((key, ChunkRecord(num_documents=record.num_documents, entry_keys=kept)))
    for key, record in changed:
        txn.put(Database.CHUNKS, key, encode_record(record))


def _drop_unreferenced(txn: Transaction) -> None:
    for _ in range(MAX_ROUNDS):
        _, findings = examine(txn, reads_payloads=False)
        damage = next((f for f in findings if f.is_damage), None)
        if damage is not None:
            raise StoreFormatError(
                f"the store is damaged ({damage.fault.value} {damage.what}): run "
                "'chunkcache store verify --repair' first"
            )
        if not findings:
            return
        for finding in findings:
            finding.mend(txn)


def _num_chunks(txn: Transaction) -> int:
    return sum(len(key) == _CHUNK_KEY_BYTES for key, _ in txn.scan(Database.CHUNKS))
