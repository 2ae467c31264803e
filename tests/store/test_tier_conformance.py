"""Every tier passes the one class of tests that authors of tiers get."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from chunkcache.entry import Entry
from chunkcache.identity import ChunkKey, EntryIdentity
from chunkcache.store.disk import DiskTier
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.eviction.registry import EVICTION_NAMES, make_eviction
from chunkcache.store.host import HostTier
from chunkcache.store.tier import MissReason, NonFiniteEntryError, Tier
from chunkcache.testing import TierConformance

CAPACITY_BYTES = 8 << 20


def _copy(entry: Entry) -> Entry:
    scales = entry.scales
    if scales is not None:
        scales = replace(scales, k=scales.k.clone(), v=scales.v.clone())
    return replace(entry, k=entry.k.clone(), v=entry.v.clone(), scales=scales)


class HostBehindTheContract:
    """The RAM tier as a store of whole entries: leases are given back at once, reads are copies."""

    name = "host"

    def __init__(self, host: HostTier) -> None:
        self._host = host

    @property
    def num_bytes(self) -> int:
        return self._host.stats().used_bytes

    @property
    def num_entries(self) -> int:
        return self._host.stats().num_entries

    def get(self, identity: EntryIdentity) -> Entry | MissReason:
        lease = self._host.get(identity.key())
        if lease is None:
            return MissReason.ABSENT
        with lease:
            if lease.entry.identity != identity:
                return MissReason.TOKEN_IDS_MISMATCH
            return _copy(lease.entry)

    def put(self, entry: Entry) -> bool:
        if not entry.is_finite():
            raise NonFiniteEntryError("an entry holds values that are not finite")
        own = _copy(entry)
        with self._host.put(own) as lease:
            return lease.entry is own

    def delete(self, key: ChunkKey) -> bool:
        return self._host.discard(key)

    def check_integrity(self) -> Sequence[tuple[ChunkKey, MissReason]]:
        self._host.check_integrity()
        return []


class TestHostTier(TierConformance):
    @pytest.fixture(params=EVICTION_NAMES)
    def tier(self, request: pytest.FixtureRequest) -> Tier:
        policy = make_eviction(request.param, CAPACITY_BYTES)
        return HostBehindTheContract(HostTier(CAPACITY_BYTES, policy))


class TestDiskTier(TierConformance):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        with StoreEnvironment.open(tmp_path / "store", max_bytes=1 << 28) as env:
            yield DiskTier(env)
