"""A state machine over the store: whatever is done to it in whatever order, it holds what it should.

Hypothesis puts, deletes, asks, leases, evicts, damages, lets time pass, collects, kills and opens
again. Beside it runs a model that is a few dictionaries. After every step the two agree, books
balance, and nothing in the store refers to what is not there.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from chunkcache.catalog import Catalog
from chunkcache.catalog_values import Neighbour
from chunkcache.documents import Chunk, Document
from chunkcache.entry import Entry
from chunkcache.identity import (
    ChunkId,
    EntryIdentity,
    ModelDigest,
    TenantNamespace,
    TokenizerDigest,
    chunk_id,
)
from chunkcache.store.disk import DiskTier
from chunkcache.store.disk_budget import DiskBudget
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.eviction.lru import LruPolicy
from chunkcache.store.host import HostTier
from chunkcache.store.lease import Lease
from chunkcache.store.stack import TierStack
from chunkcache.store.tier import MissReason, NotStored
from chunkcache.store.transaction import Database
from chunkcache.upkeep.collect import collect
from chunkcache.upkeep.verify import verify

NAMESPACE = TenantNamespace(b"n" * 32)
TOKENIZER = TokenizerDigest(b"t" * 32)
MODEL = ModelDigest(b"m" * 32)
BEHIND = "neighbours(1)"
WORDS = ("alpha", "beta", "gamma", "delta", "omega")
HOST_BYTES = 80_000
"""Room for about three of the words' entries."""

words_of = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3, unique=True).map(tuple)
names = st.sampled_from(["a", "b", "c", "d"])
words = st.sampled_from(WORDS)


def ids_of(word: str) -> tuple[int, ...]:
    return tuple(map(ord, word))


def chunk_of(word: str) -> ChunkId:
    return chunk_id(NAMESPACE, TOKENIZER, ids_of(word))


def identity_of(word: str, behind: str | None = None) -> EntryIdentity:
    return EntryIdentity(
        model=MODEL,
        namespace=NAMESPACE,
        preparation=BEHIND if behind else "alone",
        prefix_ids=ids_of(behind) if behind else (),
        codec="bf16",
        token_ids=ids_of(word),
        behind=(chunk_of(behind),) if behind else (),
    )


def entry_of(identity: EntryIdentity) -> Entry:
    """A function of the identity, as a prefill is."""
    generator = torch.Generator().manual_seed(sum(identity.token_ids) + sum(identity.prefix_ids))
    k = torch.randn((2, len(identity.token_ids), 8, 64), generator=generator).bfloat16()
    return Entry(identity, identity.key(), k=k, v=-k)


def document_of(name: str, held: tuple[str, ...], expires_at: float | None) -> Document:
    text, chunks = " ".join(held), []
    for word in held:
        start = text.index(word)
        chunks.append(Chunk(chunk_of(word), start, start + len(word), ids_of(word)))
    return Document(name, text, {}, tuple(chunks), TOKENIZER, "words", expires_at=expires_at)


class StoreMachine(RuleBasedStateMachine):
    """The store and the model of it."""

    num_steps = 0
    num_evicted = 0
    budget_bytes: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="chunkcache-machine-"))
        self.num_opened = 0
        self.now = 100.0
        self.documents: dict[str, tuple[tuple[str, ...], float | None]] = {}
        self.recorded: dict[str, str] = {}
        self.leases: list[Lease] = []
        self.is_damaged = False
        self.last: tuple[int, Any] = (-1, None)
        self.open(self.folder / "0")

    def open(self, path: Path) -> None:
        self.path = path
        self.env = StoreEnvironment.open(path, max_bytes=1 << 30)
        self.catalog = Catalog(self.env, NAMESPACE, lambda: self.now)
        max_bytes = self.budget_bytes
        self.disk = DiskTier(self.env, DiskBudget(max_bytes, LruPolicy()) if max_bytes else None)
        self.host = HostTier(HOST_BYTES)
        self.stack = TierStack(self.host, self.disk)
        self.other_host = HostTier(HOST_BYTES)
        self.other = TierStack(self.other_host, DiskTier(self.env))

    def shut(self) -> None:
        for lease in self.leases:
            lease.release()
        self.leases = []
        self.stack.check_integrity()
        assert self.stack.stats().leases_open == 0
        self.other.close()
        self.stack.close()
        self.env.close()

    def teardown(self) -> None:
        self.shut()
        shutil.rmtree(self.folder)

    # The model.

    @property
    def live(self) -> dict[str, tuple[tuple[str, ...], float | None]]:
        return {
            n: (held, expires_at)
            for n, (held, expires_at) in self.documents.items()
            if expires_at is None or expires_at > self.now
        }

    @property
    def held(self) -> set[str]:
        return {word for words_held, _ in self.documents.values() for word in words_held}

    def let_go(self) -> None:
        """Drop what stands behind words that no document holds any more."""
        held = self.held
        self.recorded = {a: b for a, b in self.recorded.items() if a in held and b in held}

    # What is done.

    @rule(
        name=names, held=words_of, ttl=st.sampled_from([None, None, 5.0, 50.0]), whole=st.booleans()
    )
    def put(self, name: str, held: tuple[str, ...], ttl: float | None, whole: bool) -> None:
        document = document_of(name, held, None if ttl is None else self.now + ttl)
        old = self.live.get(name)
        entries = [entry_of(identity_of(word)) for word in held] if whole else []
        result = self.catalog.put(document, entries=entries, now=self.now)
        same = old == (held, document.expires_at)
        assert result.status == ("created" if old is None else "unchanged" if same else "updated")
        self.stack.follow_removals()
        self.documents.pop(name, None)  # expired, it took its chunks along before they came anew
        if old is None:
            self.let_go()
        self.documents[name] = (held, document.expires_at)
        self.let_go()

    @rule(name=names)
    def delete(self, name: str) -> None:
        result = self.catalog.delete(name)
        assert result.existed == (name in self.live)
        self.stack.follow_removals()
        self.documents.pop(name, None)
        self.let_go()

    @rule(word=words, behind=words)
    def record(self, word: str, behind: str) -> None:
        if word == behind:
            return
        neighbour = Neighbour(chunk_of(behind), ids_of(behind))
        is_recorded = self.catalog.put_neighbours(BEHIND, {chunk_of(word): [neighbour]})
        if word not in self.recorded and {word, behind} <= self.held:
            self.recorded[word] = behind
        assert is_recorded == (word in self.recorded)

    @rule(word=words, keeps=st.booleans())
    def ask(self, word: str, keeps: bool) -> None:
        self.look_up(identity_of(word), keeps, is_owned=word in self.held)

    @rule(word=words, keeps=st.booleans())
    def ask_behind(self, word: str, keeps: bool) -> None:
        if word in self.recorded:
            self.look_up(identity_of(word, self.recorded[word]), keeps, is_owned=True)

    def look_up(self, identity: EntryIdentity, keeps: bool, *, is_owned: bool) -> None:
        expected = entry_of(identity)
        traced = (chunk_of("".join(map(chr, identity.token_ids))), *identity.behind)
        num_evicted = self.disk.num_evicted
        lease = self.stack.load_or_prefill(
            identity,
            lambda: entry_of(identity),
            guard=lambda txn: self.catalog.link_entry_in(txn, identity.key(), traced),
            traced=traced,
        )
        assert torch.equal(lease.entry.k, expected.k)
        assert torch.equal(lease.entry.v, expected.v)
        over_budget = {NotStored.OVER_BUDGET} if self.budget_bytes else set()
        assert lease.warning in ({None, *over_budget} if is_owned else {NotStored.UNOWNED})
        if self.disk.num_evicted > num_evicted:
            assert self.disk.num_bytes <= (self.budget_bytes or 0)
            StoreMachine.num_evicted += 1
            self.is_damaged = True  # names of what went stay, and are waste
        if keeps:
            self.leases.append(lease)
        else:
            lease.release()

    @rule(word=words)
    def ask_elsewhere(self, word: str) -> None:  # nobody tells it what the first stack removes
        found = self.other.load(identity_of(word))
        if isinstance(found, Lease):
            found.release()
            assert word in self.held
        gone = set(WORDS) - self.held
        assert not any(self.other_host.contains(identity_of(w).key()) for w in gone)

    @rule()
    def release(self) -> None:
        if self.leases:
            lease = self.leases.pop(0)
            lease.release()
            lease.release()

    @rule(word=words)
    def drop(self, word: str) -> None:
        """What an eviction from every tier does; the chunk goes on naming the entry."""
        self.stack.drop([identity_of(word).key()])
        assert self.stack.load(identity_of(word)) is MissReason.ABSENT
        self.is_damaged = True

    @rule(word=words, share=st.floats(0, 0.999))
    def damage(self, word: str, share: float) -> None:
        key = identity_of(word).key()

        def body(txn: Any) -> bool:
            value = txn.get(Database.ENTRIES, key)
            if value is None:
                return False
            spoilt = bytearray(value)
            spoilt[int(share * len(spoilt))] ^= 0x10
            txn.put(Database.ENTRIES, key, bytes(spoilt))
            return True

        self.is_damaged |= self.env.update(body)

    @rule()
    def repair(self) -> None:
        assert verify(self.env, repair=True).is_repaired
        self.is_damaged = False

    @rule(seconds=st.sampled_from([1.0, 10.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def gc(self) -> None:
        if self.is_damaged:
            self.repair()
        expired = collect(self.env, clock=lambda: self.now).expired_documents
        self.stack.follow_removals()
        assert expired == len(self.documents) - len(self.live)
        self.documents = self.live
        self.let_go()

    @rule()
    def reopen(self) -> None:
        self.shut()
        self.open(self.path)

    @rule(name=names, held=words_of)
    def crash(self, name: str, held: tuple[str, ...]) -> None:
        """What lies on disk in the middle of a change is all that the next process gets."""
        self.num_opened += 1
        copy = self.folder / str(self.num_opened)
        copy.mkdir()
        with pytest.raises(ZeroDivisionError), self.env.write() as txn:  # noqa: PT012 - the copy is mid-change
            self.catalog.put_in(txn, document_of(name, (*held, "never"), None), now=self.now)
            self.disk.put_in(txn, entry_of(identity_of("never")))
            for file in ("data.mdb", "secret.key"):
                shutil.copy2(self.path / file, copy / file)
            raise ZeroDivisionError
        old = self.path
        self.shut()
        shutil.rmtree(old)
        self.open(copy)

    # What holds after each.

    @invariant()
    def steps_are_counted(self) -> None:
        StoreMachine.num_steps += 1

    @invariant()
    def documents_are_those_of_the_model(self) -> None:
        live = self.live
        listed = self.catalog.list(limit=100)
        assert [d.document_id for d in listed] == sorted(live)
        assert self.catalog.count() == len(live)
        found = self.catalog.get_many(["a", "b", "c", "d"])
        assert {n: (tuple(d.text.split()), d.expires_at) for n, d in found.items()} == live
        places = sorted((name, index) for _, name, index in self.catalog.chunks())
        assert places == sorted((n, i) for n, (held, _) in live.items() for i in range(len(held)))

    @invariant()
    def the_generation_grows_with_every_change(self) -> None:
        generation = self.catalog.generation()
        if self.last[1] is not None and self.last[1] != self.live:
            assert generation > self.last[0]
        assert generation >= self.last[0]
        self.last = (generation, self.live)

    @invariant()
    def neighbours_are_those_on_record(self) -> None:
        found = self.catalog.get_neighbours(BEHIND, map(chunk_of, WORDS))
        assert {c: n[0].chunk_id for c, n in found.items()} == {
            chunk_of(a): chunk_of(b) for a, b in self.recorded.items()
        }

    @invariant()
    def what_nobody_holds_is_nowhere(self) -> None:
        held = self.held
        for word in WORDS:
            if word not in held:
                assert not self.disk.contains(identity_of(word).key())
                assert not self.host.contains(identity_of(word).key())

    @invariant()
    def leases_stay_readable_and_books_balance(self) -> None:
        self.stack.check_integrity()
        for lease in self.leases:
            assert torch.equal(lease.entry.k, entry_of(lease.entry.identity).k)

    @invariant()
    def nothing_refers_to_what_is_not_there(self) -> None:
        findings = verify(self.env).findings
        if not self.is_damaged:
            assert findings == ()
        assert {f.fault.value for f in findings} <= {"damaged_entry", "dangling_link"}


class BudgetMachine(StoreMachine):
    """The same with a budget on disk that holds a few entries."""

    budget_bytes = 81_920

    @rule(name=names, held=words_of)
    def fill(self, name: str, held: tuple[str, ...]) -> None:
        self.put(name, held, None, False)
        for word in held:
            self.ask(word, False)


def run(num_examples: int, num_steps: int, machine: type[StoreMachine] = StoreMachine) -> int:
    """Run so many lives of at most so many steps; says how many steps there were."""
    StoreMachine.num_steps = StoreMachine.num_evicted = 0
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return StoreMachine.num_steps


def test_a_short_life() -> None:
    assert run(12, 50) > 200


def test_a_short_life_within_a_budget() -> None:
    assert run(12, 50, BudgetMachine) > 150
    assert StoreMachine.num_evicted > 0


@pytest.mark.slow
@pytest.mark.timeout(3_600)
def test_ten_thousand_steps() -> None:
    num_steps = run(1_000, 50)
    print(num_steps, "steps")
    # Invariants are looked at before the first step of each life too.
    assert num_steps >= 10_000 + 1_000
