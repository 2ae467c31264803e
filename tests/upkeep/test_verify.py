"""Verify: every fault is found and named; a repair mends it, and loses nothing else."""

import pytest
from msgspec.structs import replace

from chunkcache.catalog_expiry import expiry_key
from chunkcache.catalog_neighbours import behind_key, reverse_key
from chunkcache.catalog_records import (
    ChunkRecord,
    CounterRecord,
    chunk_key,
    counter_key,
    info_key,
    text_key,
)
from chunkcache.errors import StoreFormatError, StoreReadOnlyError
from chunkcache.identity import TenantNamespace
from chunkcache.quota import DocumentSize
from chunkcache.store.disk import DiskTier
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.records import decode_record, encode_record
from chunkcache.store.transaction import Database
from chunkcache.upkeep.findings import Fault
from chunkcache.upkeep.verify import verify

NS = TenantNamespace(b"n" * 32)
BEHIND = b"neighbours(1)"


def flip(value: bytes) -> bytes:
    return value[:-1] + bytes([value[-1] ^ 1])


def contents(store):
    """Everything in the store, counters apart."""
    with store.env.read() as txn:
        noted = set(Database) - {Database.REMOVALS}
        found = {(d, k): bytes(v) for d in noted for k, v in txn.scan(d)}
    del found[Database.DOCUMENTS, counter_key(NS)]
    return found


def faults(report):
    return {f.fault for f in report.findings}


def repaired(store):
    """Repair, and check that a second look finds nothing."""
    report = verify(store.env, repair=True)
    assert report.is_repaired
    assert verify(store.env).findings == ()
    return report


def test_a_sound_store_has_no_findings_and_a_repair_changes_nothing(furnished) -> None:
    before = contents(furnished)
    report = verify(furnished.env)
    assert report.findings == ()
    assert report.is_sound
    assert not report.is_repaired
    checked = report.checked
    assert (checked.documents, checked.chunks, checked.entries) == (3, 4, 7)
    assert (checked.vectors, checked.quarantined) == (2, 0)
    assert checked.entry_bytes > 7 * 2 * 4 * 16
    assert verify(furnished.env, repair=True).is_sound
    assert contents(furnished) == before


def test_a_damaged_record_is_restored_from_the_text(furnished, change) -> None:
    before = furnished.catalog.require("third")
    change(furnished, Database.DOCUMENTS, info_key(NS, "third"), flip)
    with pytest.raises(StoreFormatError):
        furnished.catalog.get("third")
    report = verify(furnished.env)
    assert [(f.fault, f.what) for f in report.findings] == [(Fault.DAMAGED_DOCUMENT, "third")]
    assert not report.is_sound
    num_entries = DiskTier(furnished.env).num_entries
    repaired(furnished)
    after = furnished.catalog.require("third")
    assert (after.text, after.chunks, after.tokenizer) == (
        before.text,
        before.chunks,
        before.tokenizer,
    )
    # When it expires is noted in a second place; the rest of the record stood in that one alone.
    assert after.expires_at == 500.0
    assert (after.version, after.metadata) == (1, {})
    assert DiskTier(furnished.env).num_entries == num_entries


@pytest.mark.parametrize("damage", [flip, lambda value: None, lambda value: value[:9]])
def test_a_document_whose_text_is_lost_is_dropped_by_name_and_nothing_else(
    furnished, change, damage
) -> None:
    change(furnished, Database.DOCUMENTS, text_key(NS, "first"), damage)
    report = verify(furnished.env)
    assert report.findings[0].fault == Fault.DAMAGED_DOCUMENT
    assert report.findings[0].what == "first"
    repaired(furnished)
    assert [d.document_id for d in furnished.catalog.list(limit=9)] == ["second", "third"]
    assert furnished.catalog.count() == 2
    with furnished.env.read() as txn:
        kept = {k for k, _ in txn.scan(Database.ENTRIES)}
    # What second holds stays, beta's entry too; whatever was alpha's is gone.
    assert kept == {
        furnished.entry("beta").key,
        furnished.entry("gamma").key,
        furnished.entry("gamma", b"o" * 32).key,
        furnished.entry("delta").key,
    }
    furnished.put("first", "alpha", "beta")
    assert verify(furnished.env).findings == ()


def test_both_records_damaged(furnished, change) -> None:
    change(furnished, Database.DOCUMENTS, text_key(NS, "third"), flip)
    change(furnished, Database.DOCUMENTS, info_key(NS, "third"), flip)
    report = repaired(furnished)
    assert (report.findings[0].fault, report.findings[0].what) == (
        Fault.DAMAGED_DOCUMENT,
        "third",
    )
    assert furnished.catalog.count() == 2


def test_a_long_id_is_named_by_its_beginning(furnished, change) -> None:
    name = "x" * 900
    furnished.put(name, "omega")
    change(furnished, Database.DOCUMENTS, info_key(NS, name), flip)
    finding = verify(furnished.env).findings[0]
    assert finding.what == "x" * 256 + "..."
    repaired(furnished)
    assert furnished.catalog.get(name) is None


@pytest.mark.parametrize("share", [0.0, 0.2, 0.9999])
def test_a_damaged_entry_goes_to_the_quarantine(furnished, change, share) -> None:
    entry = furnished.entry("beta")

    def spoil(value: bytes) -> bytes:
        place = int(share * len(value))
        return value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :]

    before = contents(furnished)
    change(furnished, Database.ENTRIES, entry.key, spoil)
    report = verify(furnished.env)
    assert [(f.fault, f.what) for f in report.findings] == [(Fault.DAMAGED_ENTRY, entry.key.hex())]
    repaired(furnished)
    after = contents(furnished)
    assert before.keys() - after.keys() == {(Database.ENTRIES, entry.key)}
    assert after.keys() - before.keys() == {(Database.QUARANTINE, entry.key)}
    assert all(after[k] == before[k] for k in before.keys() & after.keys())


def test_an_entry_under_anothers_key_goes_to_the_quarantine(furnished, change) -> None:
    beta, gamma = furnished.entry("beta"), furnished.entry("gamma")
    with furnished.env.read() as txn:
        value = bytes(txn.get(Database.ENTRIES, gamma.key) or b"")
    change(furnished, Database.ENTRIES, beta.key, value)
    assert faults(verify(furnished.env)) == {Fault.DAMAGED_ENTRY}
    repaired(furnished)
    assert not DiskTier(furnished.env).contains(beta.key)
    assert DiskTier(furnished.env).contains(gamma.key)


def chunk_of(store, word):
    return chunk_key(NS, store.chunk(word))


@pytest.mark.parametrize(
    ("database", "key", "new", "fault"),
    [
        (Database.CHUNKS, lambda s: chunk_of(s, "beta"), flip, Fault.DAMAGED_CHUNK),
        (Database.CHUNKS, lambda s: chunk_of(s, "beta"), None, Fault.MISSING_CHUNK),
        (
            Database.CHUNKS,
            lambda s: chunk_of(s, "alpha"),
            encode_record(ChunkRecord(num_documents=1)),
            Fault.UNLINKED_ENTRY,
        ),
        (
            Database.CHUNKS,
            lambda s: chunk_of(s, "gamma"),
            encode_record(ChunkRecord(num_documents=1)),
            Fault.UNLINKED_ENTRY,
        ),
        (
            Database.CHUNKS,
            lambda s: chunk_of(s, "beta"),
            encode_record(ChunkRecord(num_documents=7)),
            Fault.WRONG_REFERENCES,
        ),
        (
            Database.DOCUMENTS,
            lambda s: expiry_key(NS, 500.0, "third"),
            None,
            Fault.WRONG_EXPIRY,
        ),
    ],
)
def test_what_can_be_known_from_elsewhere_is_put_right(
    furnished, change, database, key, new, fault
) -> None:
    before = contents(furnished)
    change(furnished, database, key(furnished), new)
    assert fault in faults(verify(furnished.env))
    repaired(furnished)
    assert contents(furnished) == before


@pytest.mark.parametrize(
    ("database", "key", "new", "fault"),
    [
        (Database.DOCUMENTS, lambda s: NS + b"T" + b"x" * 32, b"?", Fault.ORPHAN_TEXT),
        (Database.DOCUMENTS, lambda s: NS + b"?", b"?", Fault.UNKNOWN_RECORD),
        (
            Database.DOCUMENTS,
            lambda s: expiry_key(NS, 9.0, "first"),
            b"first",
            Fault.WRONG_EXPIRY,
        ),
        (Database.CHUNKS, lambda s: NS + b"x" * 33, b"?", Fault.UNKNOWN_RECORD),
        (
            Database.CHUNKS,
            lambda s: chunk_key(NS, b"x" * 32),
            encode_record(ChunkRecord(num_documents=1)),
            Fault.UNREFERENCED_CHUNK,
        ),
        (
            Database.CHUNKS,
            lambda s: reverse_key(NS, s.chunk("beta"), s.chunk("alpha"), BEHIND),
            b"",
            Fault.BROKEN_NEIGHBOURS,
        ),
        (Database.VECTORS, lambda s: NS + b"x" * 64, b"?", Fault.UNREFERENCED_VECTOR),
        (Database.VECTORS, lambda s: b"short", b"?", Fault.UNKNOWN_RECORD),
        (Database.QUARANTINE, lambda s: b"x" * 32, b"?", Fault.DAMAGED_QUARANTINE),
    ],
)
def test_what_belongs_to_nothing_is_dropped(furnished, change, database, key, new, fault) -> None:
    before = contents(furnished)
    change(furnished, database, key(furnished), new)
    report = verify(furnished.env)
    assert faults(report) == {fault}
    repaired(furnished)
    assert contents(furnished) == before


def test_neighbours_that_are_not_on_record_any_more(furnished, change) -> None:
    """The entry prepared behind them would outlive a deletion; it goes, its chunk stays."""
    entry = furnished.entry("alpha", behind=("gamma",))
    change(furnished, Database.CHUNKS, behind_key(NS, furnished.chunk("alpha"), BEHIND), flip)
    assert faults(verify(furnished.env)) >= {Fault.BROKEN_NEIGHBOURS, Fault.UNTRACED_ENTRY}
    repaired(furnished)
    assert not DiskTier(furnished.env).contains(entry.key)
    assert DiskTier(furnished.env).contains(furnished.entry("alpha").key)
    assert furnished.catalog.get_neighbours("neighbours(1)", [furnished.chunk("alpha")]) == {}


def test_a_missing_reference_back_drops_the_record(furnished, change) -> None:
    key = reverse_key(NS, furnished.chunk("gamma"), furnished.chunk("alpha"), BEHIND)
    change(furnished, Database.CHUNKS, key, None)
    assert Fault.BROKEN_NEIGHBOURS in faults(verify(furnished.env))
    repaired(furnished)
    assert not DiskTier(furnished.env).contains(furnished.entry("alpha", behind=("gamma",)).key)


def test_a_damaged_vector_and_damaged_counters(furnished, change) -> None:
    key = chunk_of(furnished, "alpha") + b"e" * 32
    change(furnished, Database.VECTORS, key, flip)
    change(furnished, Database.DOCUMENTS, counter_key(NS), flip)
    with pytest.raises(StoreFormatError):
        furnished.catalog.generation()
    words = [furnished.chunk(w) for w in ("alpha", "beta")]
    assert furnished.catalog.get_vectors(b"e" * 32, words).keys() == {words[1]}, "a miss"
    assert faults(verify(furnished.env)) == {Fault.DAMAGED_VECTOR, Fault.WRONG_COUNTERS}
    repaired(furnished)
    assert furnished.catalog.count() == 3
    assert furnished.catalog.generation() > 0
    kept = furnished.catalog.get_vectors(b"e" * 32, [furnished.chunk(w) for w in ("alpha", "beta")])
    assert kept.keys() == {furnished.chunk("beta")}


def test_waste_is_reported_and_is_no_damage(furnished, change) -> None:
    """An entry that eviction took leaves a name behind: nothing is wrong."""
    change(furnished, Database.ENTRIES, furnished.entry("beta").key, None)
    report = verify(furnished.env)
    assert faults(report) == {Fault.DANGLING_LINK}
    assert report.is_sound
    repaired(furnished)


def test_progress_names_what_is_looked_at(furnished) -> None:
    seen = set()
    verify(furnished.env, on_progress=lambda what, done, total: seen.add((what, done < total)))
    assert seen == {("documents", True), ("entries", True), ("chunks", True)}


def test_a_store_open_for_reading_is_examined_and_not_repaired(furnished, tmp_path) -> None:
    furnished.env.close()
    with StoreEnvironment.open(tmp_path / "store", max_bytes=1 << 30, read_only=True) as env:
        assert verify(env).is_sound
        with pytest.raises(StoreReadOnlyError):
            verify(env, repair=True)


@pytest.mark.parametrize("field", ["num_documents", "num_tokens", "record_bytes"])
def test_each_counter_of_a_tenant_is_counted_again(furnished, change, field) -> None:
    right = furnished.catalog.size()
    key = counter_key(NS)

    def off_by_one(value: bytes) -> bytes:
        record = decode_record(value, CounterRecord, "counters")
        return encode_record(replace(record, **{field: getattr(record, field) + 1}))

    change(furnished, Database.DOCUMENTS, key, off_by_one)
    assert faults(verify(furnished.env)) == {Fault.WRONG_COUNTERS}
    repaired(furnished)
    assert (furnished.catalog.size(), furnished.catalog.count()) == (right, 3)


@pytest.mark.parametrize(
    "spoiled",
    [info_key(NS, "third"), text_key(NS, "first"), counter_key(NS)],
    ids=["record", "text", "counters"],
)
def test_sizes_are_right_after_a_repair_and_nothing_when_all_is_deleted(
    furnished, change, spoiled
) -> None:
    change(furnished, Database.DOCUMENTS, spoiled, flip)
    repaired(furnished)
    size = furnished.catalog.size()
    assert min(size.num_tokens, size.record_bytes) > 0
    for info in furnished.catalog.list(limit=9):
        furnished.catalog.delete(info.document_id)
    assert furnished.catalog.size() == DocumentSize()


@pytest.mark.parametrize(
    "key",
    [b"short", NS, NS + b"C" + b"more", NS + b"?"],
    ids=["short", "a namespace alone", "too long", "of no kind"],
)
def test_a_record_under_a_key_that_nothing_has_is_dropped(furnished, change, key) -> None:
    before = contents(furnished)
    change(furnished, Database.DOCUMENTS, key, b"x")
    assert faults(verify(furnished.env)) == {Fault.UNKNOWN_RECORD}
    repaired(furnished)
    assert contents(furnished) == before
