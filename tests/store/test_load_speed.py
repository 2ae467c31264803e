"""Loading against prefilling: decided by what was measured, the same bits either way."""

import torch

from chunkcache.store.disk import DiskTier
from chunkcache.store.host import HostTier
from chunkcache.store.load_speed import Calibration, LoadSpeed
from chunkcache.store.stack import TierStack
from chunkcache.store.tier import MissReason
from chunkcache.testing import ScriptedPrefill

FAST_LOADS = Calibration(prefill_s_per_row=1e-3, load_s_per_byte=1e-9)
SLOW_LOADS = Calibration(prefill_s_per_row=1e-6, load_s_per_byte=1e-3)


def test_a_load_is_passed_over_only_where_it_is_slower_by_enough_to_matter():
    assert LoadSpeed(FAST_LOADS).should_load(10_000, 8)
    assert not LoadSpeed(SLOW_LOADS).should_load(10_000, 8)
    slower_by_little = LoadSpeed(Calibration(prefill_s_per_row=1e-9, load_s_per_byte=1e-7))
    assert slower_by_little.should_load(10_000, 8)


def test_one_slow_read_changes_nothing_and_many_do():
    speed = LoadSpeed(FAST_LOADS)
    for _ in range(3):
        speed.note_load(10_000, 1e-5)
    speed.note_load(10_000, 60.0)
    assert speed.should_load(10_000, 8)
    for _ in range(20):
        speed.note_load(10_000, 60.0)
    assert speed.is_slower(10_000, 8)
    for _ in range(20):
        speed.note_prefill(8, 240.0)
    assert not speed.is_slower(10_000, 8)


def test_a_disk_that_recovers_is_found_out():
    speed = LoadSpeed(SLOW_LOADS)
    tried = [speed.should_load(10_000, 8) for _ in range(32)]
    assert tried.count(True) == 2
    for _ in range(15):
        speed.note_load(10_000, 1e-6)
    assert speed.should_load(10_000, 8)


def test_an_entry_that_is_passed_over_has_the_same_bits_and_its_reason_counted(env, make_entry):
    entry = make_entry()
    disk = DiskTier(env)
    disk.put(entry)
    stack = TierStack(HostTier(0), disk, LoadSpeed(SLOW_LOADS))
    prefill = ScriptedPrefill(entry)
    with stack.load_or_prefill(entry.identity, prefill) as lease:
        assert (lease.source, lease.miss, lease.warning) == (
            "computed",
            MissReason.SLOWER_THAN_PREFILL,
            None,
        )
        assert torch.equal(lease.entry.k, entry.k)
        assert torch.equal(lease.entry.v, entry.v)
    with stack.load(entry.identity) as lease:
        assert lease.source == "disk"
    stats = stack.stats()
    assert stats.misses == {MissReason.SLOWER_THAN_PREFILL: 1}
    assert (stats.prefills, stats.stored, stats.entries["disk"]) == (1, 0, 1)
    assert prefill.num_calls == 1


def test_an_entry_that_is_not_on_disk_is_simply_absent(env, make_entry):
    entry = make_entry()
    stack = TierStack(HostTier(0), DiskTier(env), LoadSpeed(SLOW_LOADS))
    with stack.load_or_prefill(entry.identity, ScriptedPrefill(entry)) as lease:
        assert lease.miss is MissReason.ABSENT
    assert stack.stats().stored == 1
