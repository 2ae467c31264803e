"""Collection: expired documents with all behind them, what nothing holds, models out of use."""

import pytest

from chunkcache.errors import InvalidValueError, StoreFormatError, StoreReadOnlyError
from chunkcache.identity import ModelDigest, TenantNamespace
from chunkcache.store.disk import DiskTier
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.transaction import Database
from chunkcache.upkeep.collect import collect
from chunkcache.upkeep.verify import verify

NS = TenantNamespace(b"n" * 32)
OLD_MODEL = ModelDigest(b"o" * 32)


def contents(store):
    with store.env.read() as txn:
        return {(d, k): bytes(v) for d in Database for k, v in txn.scan(d)}


def at(now):
    return lambda: now


def test_nothing_to_collect(furnished) -> None:
    before = contents(furnished)
    report = collect(furnished.env, clock=at(100.0))
    assert (report.expired_documents, report.chunks, report.entries, report.vectors) == (0,) * 4
    assert report.freed_bytes == 0
    assert [(m.model, m.entries, m.dropped) for m in report.models] == [
        ("6d" * 32, 5, False),
        ("6f" * 32, 2, False),
    ]
    assert contents(furnished) == before


def test_an_expired_document_goes_with_everything_behind_it(furnished) -> None:
    furnished.now = 500.0
    generation = furnished.catalog.generation()
    report = collect(furnished.env, clock=at(500.0))
    assert (report.expired_documents, report.chunks, report.entries) == (1, 1, 1)
    assert report.entry_keys == (furnished.entry("delta").key,)
    assert not DiskTier(furnished.env).contains(furnished.entry("delta").key)
    assert [d.document_id for d in furnished.catalog.list(limit=9)] == ["first", "second"]
    assert furnished.catalog.generation() == generation
    assert verify(furnished.env).findings == ()


def test_what_no_document_holds_goes(furnished, change) -> None:
    stray = furnished.entry("omega")
    furnished.env.update(lambda txn: DiskTier(furnished.env).put_in(txn, stray))
    change(furnished, Database.VECTORS, NS + b"x" * 64, b"?")
    change(furnished, Database.ENTRIES, furnished.entry("beta").key, None)
    report = collect(furnished.env, clock=at(100.0))
    assert (report.entries, report.vectors, report.chunks) == (1, 1, 0)
    # What RAM may hold of an entry that the disk has lost is to be forgotten too.
    assert set(report.entry_keys) == {stray.key, furnished.entry("beta").key}
    assert verify(furnished.env).findings == ()


def test_a_model_out_of_use_goes_by_its_digest_alone(furnished) -> None:
    report = collect(furnished.env, drop_models=["6f6f6f6f"], clock=at(100.0))
    assert report.entries == 2
    assert [m.dropped for m in report.models] == [False, True]
    tier = DiskTier(furnished.env)
    assert tier.num_entries == 5
    assert not tier.contains(furnished.entry("alpha", OLD_MODEL).key)
    assert tier.contains(furnished.entry("alpha").key)
    assert verify(furnished.env).findings == ()
    # Its documents stay: the other model's entries serve them.
    assert furnished.catalog.count() == 3


@pytest.mark.parametrize("digest", ["", "6f6f", "00000000", "zzzzzzzz"])
def test_a_digest_that_names_no_model_is_refused(furnished, digest) -> None:
    before = contents(furnished)
    with pytest.raises(InvalidValueError):
        collect(furnished.env, drop_models=[digest], clock=at(1000.0))
    assert contents(furnished) == before


def test_a_dry_run_says_what_a_run_does_and_keeps_everything(furnished) -> None:
    before = contents(furnished)
    options = {"drop_models": ["6f" * 32], "clock": at(500.0)}
    told = collect(furnished.env, dry_run=True, **options)
    assert contents(furnished) == before
    done = collect(furnished.env, **options)
    assert told.dry_run
    assert not done.dry_run
    assert (told.entries, told.chunks, told.entry_keys, told.freed_bytes) == (
        done.entries,
        done.chunks,
        done.entry_keys,
        done.freed_bytes,
    )
    assert done.entries == 3
    assert done.live_bytes == told.live_bytes - done.freed_bytes


def test_the_space_of_a_large_entry_is_given_back(furnished) -> None:
    furnished.put("large", "w" * 5_000, expires_at=200.0)
    num_bytes = furnished.entry("w" * 5_000).num_bytes
    report = collect(furnished.env, clock=at(200.0))
    assert num_bytes <= report.freed_bytes < 1.2 * num_bytes
    assert report.file_bytes >= report.live_bytes


def test_a_damaged_store_is_mended_first(furnished, change) -> None:
    from chunkcache.catalog_records import text_key

    change(furnished, Database.DOCUMENTS, text_key(NS, "first"), None)
    before = contents(furnished)
    with pytest.raises(StoreFormatError, match=r"verify --repair"):
        collect(furnished.env, clock=at(100.0))
    assert contents(furnished) == before
    verify(furnished.env, repair=True)
    assert collect(furnished.env, clock=at(100.0)).entries == 0


def test_a_store_open_for_reading_is_not_collected(furnished, tmp_path) -> None:
    furnished.env.close()
    with (
        StoreEnvironment.open(tmp_path / "store", max_bytes=1 << 30, read_only=True) as env,
        pytest.raises(StoreReadOnlyError),
    ):
        collect(env, dry_run=True)
