"""What one process removes leaves the RAM of the others (invariant 11)."""

import subprocess
import sys
from pathlib import Path

import pytest

from chunkcache.catalog import Catalog
from chunkcache.store import removals
from chunkcache.store.disk import DiskTier
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.host import HostTier
from chunkcache.store.lease import Lease
from chunkcache.store.removals import last_removal, note_removal, removals_since
from chunkcache.store.stack import TierStack
from chunkcache.store.tier import MissReason, NotStored
from chunkcache.store.transaction import Database
from chunkcache.testing import ScriptedPrefill

NAMESPACE = b"n" * 32
DELETE = """
import sys
from dataclasses import replace
from pathlib import Path
from chunkcache.catalog import Catalog
from chunkcache.store.environment import StoreEnvironment

with StoreEnvironment.open(Path(sys.argv[1]), max_bytes=1 << 30) as env:
    catalog = Catalog(env, b"n" * 32)
    document = catalog.require("d")
    assert catalog.delete("d").existed
    if sys.argv[2] == "again":
        catalog.put(document, now=1.0)
"""


def delete_elsewhere(env: StoreEnvironment, then: str = "gone") -> None:
    """Another process deletes the document, and perhaps stores it again."""
    command = [sys.executable, "-c", DELETE, str(env.path), then]
    subprocess.run(command, check=True, timeout=60)


def entry_of(make_entry, word: str):
    return make_entry(token_ids=tuple(map(ord, word)))


@pytest.mark.parametrize("then", ["gone", "again"])
def test_a_delete_by_another_process_leaves_ram(env, stack, host, make_entry, make_document, then):
    alpha, beta = entry_of(make_entry, "alpha"), entry_of(make_entry, "beta")
    catalog = Catalog(env, NAMESPACE)
    catalog.put(make_document("d", "alpha"), entries=[alpha], now=1.0)
    catalog.put(make_document("e", "beta"), entries=[beta], now=1.0)
    for entry in (alpha, beta):
        with stack.load(entry.identity) as lease:
            stack.pin(lease.entry, 60.0)
    delete_elsewhere(env, then)
    assert stack.load(alpha.identity) is MissReason.ABSENT
    assert not host.contains(alpha.key)
    with stack.load(beta.identity) as lease:
        assert lease.source == "host", "what others hold stays"
    assert stack.stats().hits == {"host": 1, "disk": 2}


def test_stats_and_tiers_do_not_show_what_is_gone(env, stack, make_entry, make_document):
    entry = entry_of(make_entry, "alpha")
    Catalog(env, NAMESPACE).put(make_document("d", "alpha"), entries=[entry], now=1.0)
    stack.load(entry.identity).release()
    assert stack.tier_of(entry.key) == "host"
    delete_elsewhere(env)
    assert stack.tier_of(entry.key) is None
    assert stack.stats().entries == {"host": 0, "disk": 0}


def load_owned(stack, env, document, entry) -> Lease:
    """As the runtime loads an entry of a document's first chunk."""
    catalog, traced = Catalog(env, NAMESPACE), (document.chunks[0].chunk_id,)
    return stack.load_or_prefill(
        entry.identity,
        ScriptedPrefill(entry),
        guard=lambda txn: catalog.link_entry_in(txn, entry.key, traced),
        traced=traced,
    )


def test_what_ram_alone_holds_goes_with_its_document(tmp_path: Path, make_entry, make_document):
    """The store is full: no chunk names the entry, and its document's deletion takes it along."""
    entry = make_entry(token_ids=tuple(range(97, 97 + 5_000)))
    word = "".join(map(chr, entry.identity.token_ids))
    with StoreEnvironment.open(tmp_path / "small", max_bytes=1 << 20) as env:
        document = make_document("d", word)
        catalog = Catalog(env, NAMESPACE)
        catalog.put(document, now=1.0)
        host = HostTier(1 << 30)
        stack = TierStack(host, DiskTier(env))
        with load_owned(stack, env, document, entry) as lease:
            assert lease.warning is NotStored.STORE_FULL
        assert host.contains(entry.key)
        assert catalog.delete("d").removed.entry_keys == ()
        assert stack.load(entry.identity) is MissReason.ABSENT
        assert not host.contains(entry.key)


def test_a_reader_forgets_what_it_computed_for_a_document_that_is_gone(
    env, tmp_path: Path, make_entry, make_document
):
    entry, document = entry_of(make_entry, "alpha"), make_document("d", "alpha")
    Catalog(env, NAMESPACE).put(document, now=1.0)
    path = env.path
    env.close()
    with StoreEnvironment.open(path, max_bytes=1 << 30, read_only=True) as reader:
        host = HostTier(1 << 20)
        stack = TierStack(host, DiskTier(reader))
        with load_owned(stack, reader, document, entry) as lease:
            assert lease.warning is NotStored.READ_ONLY
        with load_owned(stack, reader, document, entry) as lease:
            assert lease.source == "host"
        delete_elsewhere(reader)
        assert stack.load(entry.identity) is MissReason.ABSENT
        with load_owned(stack, reader, document, entry) as lease:
            assert lease.warning is NotStored.UNOWNED, "planned before the deletion, run after it"
        assert not host.contains(entry.key)


def test_a_computation_under_way_is_not_kept_in_ram(env, stack, host, make_entry):
    prefill = ScriptedPrefill(make_entry())
    traced = (b"c" * 32,)

    def compute():
        env.update(lambda txn: note_removal(txn, NAMESPACE, [prefill.entry.key], traced))
        stack.follow_removals()
        return prefill()

    stack.load_or_prefill(prefill.entry.identity, compute, traced=traced).release()
    assert not host.contains(prefill.entry.key)


def test_what_was_too_much_to_list_takes_the_tenants_entries_alone(env, stack, host, make_entry):
    own, other = make_entry(1), make_entry(1, namespace=b"o" * 32)
    for entry in (own, other):
        stack.load_or_prefill(entry.identity, ScriptedPrefill(entry)).release()
    many = [i.to_bytes(32, "big") for i in range(removals.MAX_DIGESTS_PER_RECORD + 1)]
    env.update(lambda txn: note_removal(txn, NAMESPACE, many))
    stack.follow_removals()
    assert not host.contains(own.key)
    assert host.contains(other.key)


def test_the_log_is_bounded_and_says_when_some_is_missing(env, stack, host, make_entry):
    entry = make_entry()
    stack.load_or_prefill(entry.identity, ScriptedPrefill(entry)).release()
    many = [i.to_bytes(32, "big") for i in range(removals.MAX_DIGESTS_PER_RECORD)]
    for _ in range(8):
        env.update(lambda txn: note_removal(txn, NAMESPACE, many))
    with env.read() as txn:
        assert txn.num_bytes(Database.REMOVALS) <= removals.MAX_LOG_BYTES
        assert last_removal(txn) == 8
        assert not removals_since(txn, 0).is_complete
        assert removals_since(txn, 7).is_complete
    stack.follow_removals()
    assert not host.contains(entry.key)


def test_a_damaged_record_makes_readers_forget_everything(env, stack, host, make_entry):
    entry = make_entry()
    stack.load_or_prefill(entry.identity, ScriptedPrefill(entry)).release()
    env.update(lambda txn: note_removal(txn, NAMESPACE, [b"k" * 32]))
    with env.read() as txn:
        key = txn.last_key(Database.REMOVALS)
    env.update(lambda txn: txn.put(Database.REMOVALS, key, b"rubbish"))
    stack.follow_removals()
    assert not host.contains(entry.key)


def test_nothing_is_logged_where_nothing_went(env, make_document):
    catalog = Catalog(env, NAMESPACE)
    catalog.put(make_document("d", "alpha"), now=1.0)
    catalog.put(make_document("e", "alpha"), now=1.0)
    catalog.delete("d")
    with env.read() as txn:
        assert last_removal(txn) == 0
