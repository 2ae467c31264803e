"""Damaged records of the catalog: what goes on without them, and what a repair may not take back."""

from dataclasses import replace

import pytest

from chunkcache.catalog_expiry import expiry_key
from chunkcache.catalog_neighbours import behind_key
from chunkcache.catalog_records import info_key, text_key
from chunkcache.catalog_values import Neighbour
from chunkcache.errors import StoreFormatError
from chunkcache.identity import TenantNamespace
from chunkcache.store.disk import DiskTier
from chunkcache.store.transaction import Database
from chunkcache.upkeep.findings import Fault
from chunkcache.upkeep.verify import verify

NS = TenantNamespace(b"n" * 32)
BEHIND = b"neighbours(1)"


def flip(value: bytes) -> bytes:
    return value[:-1] + bytes([value[-1] ^ 1])


def repaired(store):
    """Repair, and check that a second look finds nothing."""
    report = verify(store.env, repair=True)
    assert report.is_repaired
    assert verify(store.env).findings == ()
    return report


@pytest.mark.parametrize("key", [info_key(NS, "first"), text_key(NS, "first")], ids=["I", "T"])
def test_a_damaged_document_takes_no_other_from_lists_and_indexes(furnished, change, key) -> None:
    change(furnished, Database.DOCUMENTS, key, flip)
    listed = [info.document_id for info in furnished.catalog.list(limit=9)]
    assert [name for name in listed if name != "first"] == ["second", "third"]
    places = {(name, index) for _, name, index in furnished.catalog.chunks()}
    assert places == {("second", 0), ("second", 1), ("third", 0)}
    for act in (furnished.catalog.get, furnished.catalog.delete):
        with pytest.raises(StoreFormatError, match="document 'first' is damaged"):
            act("first")


def test_a_restored_document_is_seen_by_indexes_though_its_size_is_the_same(
    furnished, change
) -> None:
    # What the record loses of its metadata, the name of its splitter takes.
    document = replace(furnished.document("same", "omega"), metadata={"a": "12"})
    furnished.catalog.put(document, now=furnished.now)
    before = furnished.catalog.generation(), furnished.catalog.size()
    change(furnished, Database.DOCUMENTS, info_key(NS, "same"), flip)
    repaired(furnished)
    assert furnished.catalog.size() == before[1]
    assert furnished.catalog.generation() > before[0]


def test_a_stray_note_of_an_expiry_goes_without_a_generation_coming_twice(
    furnished, change
) -> None:
    before = furnished.catalog.generation()
    change(furnished, Database.DOCUMENTS, expiry_key(NS, 50.0, "gone"), b"gone")
    seen = furnished.catalog.generation()
    assert seen > before
    assert {f.fault for f in repaired(furnished).findings} == {Fault.WRONG_EXPIRY}
    assert furnished.catalog.generation() >= seen


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_a_damaged_record_of_neighbours_is_none_and_keeps_nothing_from_removal(
    furnished, change, order
) -> None:
    alpha, beta = furnished.chunk("alpha"), furnished.chunk("beta")
    behind = furnished.entry("alpha", behind=("gamma",)).key
    change(furnished, Database.CHUNKS, behind_key(NS, alpha, BEHIND), flip)
    assert furnished.catalog.get_neighbours("neighbours(1)", [alpha]) == {}
    other = Neighbour(beta, tuple(map(ord, "beta")))
    # Its entry still holds a trace of gamma: with beta on record, gamma's removal would miss it.
    assert furnished.catalog.put_neighbours("neighbours(1)", {alpha: [other]}) == 0
    furnished.catalog.delete(order[0])
    assert not DiskTier(furnished.env).contains(behind)
    furnished.catalog.delete(order[1])
    repaired(furnished)
    assert [d.document_id for d in furnished.catalog.list(limit=9)] == ["third"]
