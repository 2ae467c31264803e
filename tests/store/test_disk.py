"""The disk tier: damage is met once, non-finite values never get in, nothing is written twice."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from chunkcache.codecs import CODECS
from chunkcache.entry import Entry
from chunkcache.errors import StoreError
from chunkcache.store import disk
from chunkcache.store.disk import DiskTier, QuarantineRecord
from chunkcache.store.entry_format import decode_header, encode_entry
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.records import decode_record
from chunkcache.store.tier import MissReason, NonFiniteEntryError, Tier
from chunkcache.store.transaction import Database


@pytest.fixture
def tier(env):
    return DiskTier(env)


def overwrite(env, key, change):
    """Change the stored bytes of an entry behind the tier's back."""

    def body(txn):
        value = txn.get(Database.ENTRIES, key)
        txn.put(Database.ENTRIES, key, change(bytearray(value)))

    env.update(body)


def flip_middle(data):
    data[len(data) // 2] ^= 1
    return bytes(data)


def test_the_disk_tier_is_a_tier(env):
    tier: Tier = DiskTier(env)
    assert tier.name == "disk"


def test_an_entry_outlives_its_process(tmp_path, make_entry):
    entries = [make_entry(i) for i in range(50)]
    with StoreEnvironment.open(tmp_path / "s", max_bytes=1 << 28) as env:
        tier = DiskTier(env)
        assert all(tier.put(e) for e in entries)
    with StoreEnvironment.open(tmp_path / "s", max_bytes=1 << 28) as env:
        tier = DiskTier(env)
        assert tier.num_entries == 50
        assert tier.num_bytes >= 50 * entries[0].num_bytes
        for entry in entries:
            read = tier.get(entry.identity)
            assert isinstance(read, Entry)
            assert torch.equal(read.k, entry.k)
            assert not tier.put(entry)
        assert tier.check_integrity() == []


def test_what_was_read_can_be_changed_without_changing_the_store(tier, make_entry):
    entry = make_entry()
    tier.put(entry)
    tier.get(entry.identity).k.mul_(2)
    assert torch.equal(tier.get(entry.identity).k, entry.k)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (flip_middle, MissReason.CHECKSUM),
        (lambda data: bytes(data[: len(data) // 2]), MissReason.TRUNCATED),
        (lambda data: bytes(64) + bytes(data[64:]), MissReason.CORRUPT_HEADER),
        (lambda data: b"\xff" * 100_000, MissReason.CORRUPT_HEADER),
        (lambda data: b"", MissReason.TRUNCATED),
    ],
)
def test_a_damaged_entry_is_met_once_and_can_be_stored_again(env, tier, make_entry, change, reason):
    entry = make_entry()
    tier.put(entry)
    overwrite(env, entry.key, change)
    assert tier.check_integrity() == [(entry.key, reason)]
    assert tier.get(entry.identity) is reason
    assert tier.get(entry.identity) is MissReason.ABSENT
    assert tier.num_quarantined == 1
    with env.read() as txn:
        [(key, data)] = txn.scan(Database.QUARANTINE)
        record = decode_record(data, QuarantineRecord, "")
    assert (key, record.reason) == (entry.key, reason.value)
    assert len(record.head) <= 4_096
    assert tier.put(entry)
    assert torch.equal(tier.get(entry.identity).k, entry.k)


def test_a_put_replaces_a_damaged_entry(env, tier, make_entry):
    entry = make_entry()
    tier.put(entry)
    overwrite(env, entry.key, flip_middle)
    assert tier.put(entry)
    assert torch.equal(tier.get(entry.identity).v, entry.v)


def test_an_entry_filed_under_anothers_key_is_not_served(env, tier, make_entry):
    entry, other = make_entry(1), make_entry(2)
    env.update(lambda txn: txn.put(Database.ENTRIES, entry.key, encode_entry(other)))
    assert tier.get(entry.identity) is MissReason.TOKEN_IDS_MISMATCH
    assert tier.put(entry)
    assert torch.equal(tier.get(entry.identity).k, entry.k)


def test_another_model_misses_and_destroys_nothing(tier, make_entry):
    entry = make_entry()
    tier.put(entry)
    other = replace(entry.identity, model=b"w" * 32)
    assert tier.get(other) is MissReason.ABSENT
    assert torch.equal(tier.get(entry.identity).k, entry.k)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_values_that_are_not_finite_are_refused(tier, make_entry, value):
    entry = make_entry(codec="raw16")
    entry.k[1, 2, 0, 3] = value
    with pytest.raises(NonFiniteEntryError):
        tier.put(entry)
    assert tier.num_entries == 0


def test_an_overflow_of_fp16_is_refused(tier, make_entry):
    entry = make_entry(codec="raw16")
    k = entry.k.float()
    k[0, 0, 0, 0] = 70_000
    with pytest.raises(NonFiniteEntryError):
        tier.put(replace(entry, k=k.half()))


def test_a_deleted_entry_leaves_nothing_in_the_quarantine(env, tier, make_entry):
    entry = make_entry()
    tier.put(entry)
    overwrite(env, entry.key, flip_middle)
    tier.get(entry.identity)
    tier.put(entry)
    assert tier.delete(entry.key)
    assert not tier.delete(entry.key)
    with env.read() as txn:
        assert [*txn.scan(Database.QUARANTINE), *txn.scan(Database.ENTRIES)] == []


def test_the_quarantine_is_bounded_and_drops_the_oldest(env, tier, make_entry, monkeypatch):
    monkeypatch.setattr(disk, "MAX_QUARANTINED", 3)
    entries = [make_entry(i) for i in range(5)]
    for entry in entries:
        tier.put(entry)
        overwrite(env, entry.key, flip_middle)
        tier.get(entry.identity)
    with env.read() as txn:
        kept = {key for key, _ in txn.scan(Database.QUARANTINE)}
    assert kept == {e.key for e in entries[2:]}


def test_a_read_only_store_reports_damage_and_stays_as_it_is(tmp_path, make_entry):
    entry = make_entry()
    with StoreEnvironment.open(tmp_path / "s", max_bytes=1 << 28) as env:
        DiskTier(env).put(entry)
        overwrite(env, entry.key, flip_middle)
    with StoreEnvironment.open(tmp_path / "s", max_bytes=1 << 28, read_only=True) as env:
        tier = DiskTier(env)
        for _ in range(2):
            assert tier.get(entry.identity) is MissReason.CHECKSUM
        with pytest.raises(StoreError):
            tier.put(entry)


def test_an_integrity_check_goes_through_more_than_one_batch(env, tier, make_entry, monkeypatch):
    monkeypatch.setattr(disk, "_SCAN_BATCH", 4)
    entries = [make_entry(i) for i in range(12)]
    for entry in entries:
        tier.put(entry)
    damaged = {e.key for e in entries[::3]}
    for key in damaged:
        overwrite(env, key, flip_middle)
    assert {key for key, _ in tier.check_integrity()} == damaged


def test_entries_put_in_one_transaction_are_kept_together(env, tier, make_entry):
    entries = [make_entry(i) for i in range(3)]
    entries[2].k[0, 0, 0, 0] = torch.nan
    with pytest.raises(NonFiniteEntryError):
        env.update(lambda txn: [tier.put_in(txn, entry) for entry in entries])
    assert tier.num_entries == 0
    assert env.update(lambda txn: [tier.put_in(txn, entry) for entry in entries[:2]]) == [True] * 2
    assert tier.contains(entries[0].key)
    assert not tier.contains(entries[2].key)


@pytest.mark.parametrize("codec", ["raw32", "int8"])
def test_an_entry_is_lent_where_it_lies(env, tier, make_entry, codec):
    """While it is lent, others write, replace and delete; the lent numbers stay as they are."""
    entry = make_entry(num_tokens=200, codec=codec)
    tier.put(entry)
    loan = tier.lend(entry.identity)
    assert torch.equal(loan.entry.k, entry.k)
    assert (loan.entry.key, loan.entry.identity) == (entry.key, entry.identity)
    assert not loan.entry.k.is_contiguous(), "it was copied"
    others = [make_entry(seed, num_tokens=200, codec=codec) for seed in range(1, 20)]
    with ThreadPoolExecutor(1) as another:
        another.submit(tier.delete, entry.key).result()
        assert all(another.map(tier.put, others))
    assert torch.equal(loan.entry.k, entry.k)
    assert torch.equal(loan.entry.v, entry.v)
    loan.give_back()
    assert tier.lend(entry.identity) is MissReason.ABSENT


def test_a_loan_that_has_been_given_back_does_not_hold_up_growth(tmp_path, make_entry):
    with StoreEnvironment.open(tmp_path / "s", max_bytes=1 << 28) as env:
        tier = DiskTier(env)
        first = make_entry(0, num_tokens=500)
        tier.put(first)
        map_bytes = env.map_bytes
        seed = 1
        while env.map_bytes == map_bytes:
            loan = tier.lend(first.identity)
            assert torch.equal(loan.entry.v, first.v)
            loan.give_back()
            tier.put(make_entry(seed, num_tokens=20_000))
            seed += 1


def test_a_damaged_entry_is_not_lent(env, tier, make_entry):
    entry = make_entry(num_tokens=200)
    tier.put(entry)
    overwrite(env, entry.key, flip_middle)
    assert tier.lend(entry.identity) is MissReason.CHECKSUM
    assert tier.num_quarantined == 1
    assert tier.lend(entry.identity) is MissReason.ABSENT


def test_one_store_holds_entries_of_every_codec(env, tier, make_entry):
    """The same tokens under each codec: keys differ, headers say which, each comes back as itself."""
    entries = {name: make_entry(codec=name) for name in CODECS}
    assert len({e.key for e in entries.values()}) == len(CODECS)
    for entry in entries.values():
        assert tier.put(entry)
    assert tier.check_integrity() == []
    for name, entry in entries.items():
        with env.read() as txn:
            assert decode_header(txn.get(Database.ENTRIES, entry.key)).codec == name
        assert tier.get(entry.identity).k.dtype == CODECS[name].dtype
    env.update(
        lambda txn: txn.put(Database.ENTRIES, entries["int8"].key, encode_entry(entries["fp8"]))
    )
    assert tier.get(entries["int8"].identity) is MissReason.CODEC_MISMATCH


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_a_quantised_entry_that_is_not_finite_is_refused(tier, make_entry, codec):
    entry = make_entry(codec=codec)
    entry.scales.k[0, 0, 1, 3] = torch.nan
    with pytest.raises(NonFiniteEntryError):
        tier.put(entry)
