"""What every tier must do, as one class of tests that a tier's author inherits.

::

    class TestMyTier(TierConformance):
        @pytest.fixture
        def tier(self):
            return MyTier(...)

Knows the contract (:class:`chunkcache.store.tier.Tier`) and nothing of a particular tier. Ordinary
assertions; pytest is not imported.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from chunkcache.codecs import CODECS, LayerEncoder
from chunkcache.entry import Entry, EntryShape
from chunkcache.identity import EntryIdentity, ModelDigest, TenantNamespace
from chunkcache.store.tier import MissReason, NonFiniteEntryError, Tier

_SHAPE = (3, 2, 16)
"""Layers, KV heads, head dimension."""


def conformance_entry(
    seed: int,
    *,
    num_tokens: int = 8,
    tenant: bytes = b"n",
    model: bytes = b"m",
    codec: str = "raw32",
) -> Entry:
    """A small entry; the seed decides token ids and numbers."""
    identity = EntryIdentity(
        model=ModelDigest(model * 32),
        namespace=TenantNamespace(tenant * 32),
        preparation="alone",
        prefix_ids=(),
        codec=codec,
        token_ids=tuple(seed * 1_000 + i for i in range(num_tokens)),
    )
    num_layers, num_kv_heads, head_dim = _SHAPE
    generator = torch.Generator().manual_seed(seed)
    shape = EntryShape(num_layers, num_tokens, num_kv_heads, head_dim)
    k = torch.randn(shape.axes, generator=generator)
    v = torch.randn(shape.axes, generator=generator)
    encoder = LayerEncoder(CODECS[codec], shape)
    for layer in range(num_layers):
        encoder.write(layer, k[layer], v[layer])
    return Entry(identity, identity.key(), encoder.k, encoder.v, encoder.scales)


class TierConformance:
    """Give a fixture ``tier``: empty, with room for a few megabytes."""

    def test_it_has_a_name_and_begins_empty(self, tier: Tier) -> None:
        """The name is a label: short and plain."""
        assert tier.name.isidentifier()
        assert tier.num_entries == 0
        assert tier.get(conformance_entry(1).identity) is MissReason.ABSENT
        assert not tier.delete(conformance_entry(1).key)
        assert list(tier.check_integrity()) == []

    def test_every_bit_comes_back(self, tier: Tier) -> None:
        """Numbers at the edges of the format too."""
        entry = conformance_entry(1)
        edges = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3.4028235e38, -3.4028235e38, 1.0, -1.0])
        entry.k.view(-1)[: len(edges)] = edges
        assert tier.put(entry)
        found = _found(tier, entry)
        for name in ("k", "v"):
            stored, kept = getattr(found, name), getattr(entry, name)
            assert stored.shape == kept.shape
            assert stored.dtype == kept.dtype
            assert torch.equal(stored.view(torch.int32), kept.view(torch.int32))
        assert found.identity == entry.identity
        assert found.key == entry.key

    def test_entries_of_every_codec_lie_side_by_side(self, tier: Tier) -> None:
        """The same tokens under each codec; quantised ones come back with their scales."""
        entries = [conformance_entry(1, codec=name, num_tokens=70) for name in CODECS]
        assert all(tier.put(entry) for entry in entries)
        for entry in entries:
            found = _found(tier, entry)
            pairs = [(found.k, entry.k), (found.v, entry.v)]
            assert (found.scales is None) == (entry.scales is None)
            if found.scales is not None and entry.scales is not None:
                pairs += [(found.scales.k, entry.scales.k), (found.scales.v, entry.scales.v)]
                assert found.scales.group_tokens == entry.scales.group_tokens
            for stored, kept in pairs:
                assert stored.dtype == kept.dtype
                assert torch.equal(stored.view(torch.uint8), kept.view(torch.uint8))

    def test_a_second_put_changes_nothing(self, tier: Tier) -> None:
        """Entries are immutable."""
        entry = conformance_entry(1)
        assert tier.put(entry)
        num_bytes = tier.num_bytes
        assert not tier.put(conformance_entry(1))
        assert (tier.num_entries, tier.num_bytes) == (1, num_bytes)

    def test_what_is_read_belongs_to_the_reader(self, tier: Tier) -> None:
        """Writing into it changes neither the tier nor what others read."""
        entry = conformance_entry(1)
        tier.put(entry)
        first = _found(tier, entry)
        first.k.mul_(2)
        first.v.zero_()
        assert torch.equal(_found(tier, entry).k, conformance_entry(1).k)
        assert torch.equal(_found(tier, entry).v, conformance_entry(1).v)

    def test_what_was_put_belongs_to_the_caller_no_more_than_before(self, tier: Tier) -> None:
        """Dropping the caller's entry does not drop the tier's."""
        tier.put(conformance_entry(1))
        assert torch.equal(_found(tier, conformance_entry(1)).v, conformance_entry(1).v)

    def test_whatever_differs_is_a_miss(self, tier: Tier) -> None:
        """Another tenant, model, text, preparation, prefix or codec finds nothing."""
        entry = conformance_entry(1)
        tier.put(entry)
        for other in (
            conformance_entry(2).identity,
            conformance_entry(1, tenant=b"o").identity,
            conformance_entry(1, model=b"o").identity,
            replace(entry.identity, preparation="system"),
            replace(entry.identity, prefix_ids=(1,)),
            replace(entry.identity, codec="bf16"),
            replace(entry.identity, token_ids=entry.identity.token_ids[:-1]),
        ):
            assert isinstance(tier.get(other), MissReason)
        assert torch.equal(_found(tier, entry).k, entry.k)

    def test_an_entry_filed_under_anothers_key_is_not_served(self, tier: Tier) -> None:
        """A key alone proves nothing: token ids are compared."""
        wanted, other = conformance_entry(1), conformance_entry(2)
        tier.put(replace(other, key=wanted.key))
        assert isinstance(tier.get(wanted.identity), MissReason)

    def test_values_that_are_not_finite_are_refused(self, tier: Tier) -> None:
        """They would poison every later answer."""
        for value in (float("nan"), float("inf"), float("-inf")):
            entry = conformance_entry(1)
            entry.v[-1, -1, -1, -1] = value
            try:
                tier.put(entry)
            except NonFiniteEntryError:
                pass
            else:
                raise AssertionError(f"an entry with {value} was kept")
            assert tier.get(entry.identity) is MissReason.ABSENT
        assert tier.num_entries == 0

    def test_deleting_removes_one_and_is_told_apart_from_nothing(self, tier: Tier) -> None:
        """A deleted entry is a miss, and can come back."""
        entries = [conformance_entry(seed) for seed in range(3)]
        for entry in entries:
            tier.put(entry)
        assert tier.delete(entries[1].key)
        assert not tier.delete(entries[1].key)
        assert tier.get(entries[1].identity) is MissReason.ABSENT
        assert tier.num_entries == 2
        for entry in (entries[0], entries[2]):
            assert torch.equal(_found(tier, entry).k, entry.k)
        assert tier.put(entries[1])
        assert torch.equal(_found(tier, entries[1]).v, entries[1].v)

    def test_bytes_and_entries_are_counted(self, tier: Tier) -> None:
        """They grow with what is put and return to nothing."""
        entries = [conformance_entry(seed, num_tokens=32) for seed in range(6)]
        payload_bytes = sum(entry.num_bytes for entry in entries)
        empty_bytes = tier.num_bytes
        for entry in entries:
            tier.put(entry)
        assert tier.num_entries == len(entries)
        assert tier.num_bytes - empty_bytes >= payload_bytes
        assert list(tier.check_integrity()) == []
        for entry in entries:
            tier.delete(entry.key)
        assert (tier.num_entries, tier.num_bytes) == (0, empty_bytes)

    def test_many_threads_see_whole_entries(self, tier: Tier) -> None:
        """Puts, gets and deletes of the same few keys at once."""
        entries = [conformance_entry(seed) for seed in range(4)]

        def work(thread: int) -> int:
            num_found = 0
            for turn in range(12):
                entry = entries[(thread + turn) % len(entries)]
                if (thread + turn) % 5 == 0:
                    tier.delete(entry.key)
                else:
                    tier.put(entry)
                found = tier.get(entry.identity)
                if isinstance(found, Entry):
                    num_found += 1
                    assert torch.equal(found.k, entry.k)
                    assert torch.equal(found.v, entry.v)
            return num_found

        with ThreadPoolExecutor(6) as pool:
            assert sum(pool.map(work, range(6))) > 0
        assert list(tier.check_integrity()) == []


def _found(tier: Tier, entry: Entry) -> Entry:
    found = tier.get(entry.identity)
    assert isinstance(found, Entry), found
    return found
