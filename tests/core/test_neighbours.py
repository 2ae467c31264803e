"""Chunks prepared behind their neighbours: named, recorded, computed again, dropped, prepared anew."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from chunkcache import AskOptions, ChunkCache, TextItem
from chunkcache.entry import Entry
from chunkcache.errors import InvalidValueError, StoreFullError
from chunkcache.identity import ChunkId, ChunkKey, chunk_id
from chunkcache.store.disk import DiskTier
from chunkcache.store.transaction import Database

QUESTION = "Who keeps the key?"
NAMES = ("a", "b", "c", "d")
TEXTS = {
    "a": "The key to the tower is kept by the baker.",
    "b": "The door of the tower opens at dusk.",
    "c": "The baker sells bread from seven in the morning.",
    "d": "The ferry leaves from the northern pier.",
}


class Ranking:
    """Ranks documents of one chunk by the order of their names given for each."""

    def __init__(self, cache: ChunkCache, **orders: str) -> None:
        self._cache = cache
        self._orders = orders
        self.extra: list[ChunkId] = []

    def nearest(self, chunk_id: ChunkId) -> Iterator[ChunkId]:
        yield from self.extra
        by_name = {d: c for c, d, _ in self._cache.catalog.chunks()}
        name = next(d for d, c in by_name.items() if c == chunk_id)
        order: Sequence[str] = self._orders.get(name, "abcd")
        yield from (by_name[other] for other in order if other in by_name)


@pytest.fixture
def open_prepared(
    open_cache: Callable[..., Any], model_dir: Callable[..., Any]
) -> Callable[..., ChunkCache]:
    """Opens a cache whose chunks have neighbours; the model has room for the preamble."""

    def make(**settings: Any) -> ChunkCache:
        model = model_dir(max_position_embeddings=2048)
        return open_cache(model=model, **({"preparation": "neighbours(2)"} | settings))

    return make


@pytest.fixture
def cache(open_prepared: Callable[..., ChunkCache]) -> ChunkCache:
    return open_prepared()


def _precache(cache: ChunkCache, names: Sequence[str] = NAMES, **options: Any) -> Any:
    ranking = options.pop("neighbours", None) or Ranking(cache, a="abcd", b="badc")
    items = [TextItem(name, TEXTS[name]) for name in names]
    return cache.precache(items, neighbours=ranking, **options)


def _identity(cache: ChunkCache, name: str, **options: Any) -> Any:
    return cache.plan(QUESTION, [name], AskOptions(**options)).identities[0]


def _stored(cache: ChunkCache) -> dict[bytes, bytes]:
    with cache.runtime.env.read() as txn:
        return {key: bytes(value) for key, value in txn.scan(Database.ENTRIES)}


def _is_anywhere(cache: ChunkCache, key: ChunkKey) -> bool:
    in_ram = cache.runtime.stack._host.contains(key)
    return in_ram or cache.runtime.stack.contains(key)


def test_a_chunk_reads_its_neighbours_as_if_they_stood_before_it_in_a_prompt(
    cache: ChunkCache,
) -> None:
    summary = _precache(cache)
    assert (summary.created, summary.prefilled_chunks, summary.without_neighbours) == (4, 4, 0)
    identity = _identity(cache, "a")
    assert identity.preparation == "neighbours(2)"
    # The nearest is b: it stands last.
    layout = cache.plan(QUESTION, ["c", "b", "a"], AskOptions()).layout
    assert identity.prefix_ids == layout.token_ids[: layout.chunks[2].start]
    ids = {d: c for c, d, _ in cache.catalog.chunks()}
    assert identity.behind == (ids["c"], ids["b"])
    answer = cache.answer(QUESTION, ["a", "d"], policy="none", max_tokens=2)
    assert answer.report.preparation == "neighbours(2)"
    assert not answer.report.warnings
    assert answer.report.account.computed_tokens < answer.report.account.prompt_tokens


def test_an_entry_is_what_a_full_prefill_computes_there(
    open_prepared: Callable[..., ChunkCache],
) -> None:
    """Behind the very chunks that it is prepared behind, reuse is exact up to the codec.

    1. Entry of a, prepared behind c and b: keys and values without what stands in front.
    2. Entry of the whole prompt up to a's end, prefilled alone: its last rows.
    """
    raw = open_prepared(store="raw", codec="raw")
    _precache(raw)
    identity = _identity(raw, "a")
    with raw.runtime.ensure_entry(identity) as lease:
        entry = lease.entry
    token_ids = identity.prefix_ids + identity.token_ids
    whole = replace(identity, preparation="alone", prefix_ids=(), token_ids=token_ids, behind=())
    expected = raw.runtime.engine.call(
        lambda: raw.runtime.prefill.compute(whole, raw.runtime.codec)
    ).result()
    num_tokens = len(identity.token_ids)
    torch.testing.assert_close(entry.k, expected.k[:, -num_tokens:], atol=2e-5, rtol=0)
    torch.testing.assert_close(entry.v, expected.v[:, -num_tokens:], atol=2e-5, rtol=0)


def test_the_key_names_the_neighbours_and_their_order(
    open_prepared: Callable[..., ChunkCache],
) -> None:
    cache = open_prepared()
    names = count()

    def key(order: str, preparation: str = "neighbours(2)") -> bytes:
        other = open_prepared(store=f"s{next(names)}", preparation=preparation)
        _precache(other, neighbours=Ranking(other, a=order))
        identity = _identity(other, "a")
        return replace(identity, namespace=cache.catalog.namespace).key()

    keys = [key("abc"), key("acb"), key("abd"), key("abc", "neighbours(1)")]
    assert len(set(keys)) == 4
    assert key("abc") == keys[0]


def test_a_second_run_prefills_nothing_and_growth_changes_nothing(cache: ChunkCache) -> None:
    _precache(cache, "abc")
    before = _stored(cache)
    again = _precache(cache, "abc")
    assert (again.unchanged, again.prefilled_chunks, again.prefill_rows) == (3, 0, 0)
    # d would now be the nearest of all; who has neighbours keeps them.
    grown = _precache(cache, neighbours=Ranking(cache, a="adbc", b="dabc", c="dabc"))
    assert (grown.created, grown.prefilled_chunks) == (1, 1)
    assert before.items() <= _stored(cache).items()


def test_an_entry_computed_again_has_the_same_bits(
    open_prepared: Callable[..., ChunkCache],
) -> None:
    cache = open_prepared(host_tier_bytes=0)
    _precache(cache)
    before = _stored(cache)
    key = _identity(cache, "a").key()
    # Evicted; computed for a question, behind whatever the scratch memory held.
    cache.runtime.stack.drop([key])
    cache.put("e", "It comes back at five.")
    answer = cache.answer(QUESTION, ["a"], policy="none", max_tokens=2)
    assert [d.source for d in answer.report.documents] == ["computed"]
    assert _stored(cache)[key] == before[key]
    # Gone with everything else but the catalog; computed by another process.
    cache.runtime.stack.drop(map(ChunkKey, before))
    cache.close()
    cache = open_prepared(host_tier_bytes=0)
    assert _precache(cache).prefilled_chunks == 5
    assert {k: v for k, v in _stored(cache).items() if k in before} == before


def test_what_it_costs_is_counted(cache: ChunkCache) -> None:
    summary = _precache(cache, neighbours=Ranking(cache, a="bc", b="cd", c="da", d="ab"))
    identities = [_identity(cache, name) for name in NAMES]
    expected = sum(len(i.prefix_ids) + len(i.token_ids) for i in identities)
    assert summary.prefill_rows == expected
    tokens = sum(len(i.token_ids) for i in identities)
    assert summary.prefilled_tokens == tokens
    assert summary.prefill_rows_per_token == pytest.approx(expected / tokens)


def test_a_fixed_prefix_is_paid_for_once(open_prepared: Callable[..., ChunkCache]) -> None:
    cache = open_prepared(preparation="sink(4)")
    summary = cache.precache([TextItem(n, t) for n, t in TEXTS.items()])
    assert summary.prefill_rows == 4 + summary.prefilled_tokens


def test_chunks_met_first_are_prepared_behind_the_preamble(cache: ChunkCache) -> None:
    """A put has nothing to find neighbours with; the next run has."""
    assert cache.put("a", TEXTS["a"]).prefilled_chunks == 1
    assert _identity(cache, "a").preparation == "preamble"
    _precache(cache, "bcd", document_ids=["b"])
    answer = cache.answer(QUESTION, ["a", "b"], policy="none", max_tokens=2)
    assert [(w.code, w.document_id) for w in answer.report.warnings] == [("no_neighbours", "a")]
    full = cache.answer(QUESTION, ["a", "b"], policy="full", max_tokens=2)
    assert not full.report.warnings, "nothing is reused, so nothing falls back"
    summary = cache.precache(neighbours=Ranking(cache))
    assert (summary.documents, summary.prefilled_chunks) == (0, 3)
    assert _identity(cache, "a").preparation == "neighbours(2)"
    answer = cache.answer(QUESTION, ["a", "b"], policy="none", max_tokens=2)
    assert not answer.report.warnings


def test_a_chunk_alone_has_no_neighbours_until_there_are_some(cache: ChunkCache) -> None:
    summary = _precache(cache, "a")
    assert (summary.without_neighbours, summary.prefilled_chunks) == (1, 1)
    assert _identity(cache, "a").preparation == "preamble"
    assert _precache(cache, "a").prefilled_chunks == 0
    summary = _precache(cache, "ab")
    assert (summary.without_neighbours, summary.prefilled_chunks) == (0, 2)
    assert len(_identity(cache, "a").behind) == 1, "fewer than asked for, where there are no more"


def test_a_deletion_drops_what_was_prepared_behind_it_and_the_next_run_prepares_it_anew(
    cache: ChunkCache,
) -> None:
    ranking = Ranking(cache, a="bcd", b="cda", c="dab", d="abc")
    _precache(cache, neighbours=ranking)
    cache.answer(QUESTION, list(NAMES), policy="none", max_tokens=2)  # all are in RAM now
    keys = {name: _identity(cache, name).key() for name in NAMES}
    removed = cache.delete("b")
    # Behind b were a (with c) and d (with a); c is behind d and a.
    assert (removed.removed_entries, removed.unprepared_chunks) == (3, 2)
    assert [n for n in NAMES if _is_anywhere(cache, keys[n])] == ["c"]

    answer = cache.answer(QUESTION, ["a", "c", "d"], policy="none", max_tokens=2)
    assert {w.document_id for w in answer.report.warnings} == {"a", "d"}
    assert {w.code for w in answer.report.warnings} == {"no_neighbours"}

    summary = cache.precache(neighbours=ranking)
    assert summary.prefilled_chunks == 2
    ids = {d: c for c, d, _ in cache.catalog.chunks()}
    assert _identity(cache, "a").behind == (ids["d"], ids["c"])
    assert _identity(cache, "c").key() == keys["c"]


def test_a_new_version_drops_what_was_prepared_behind_the_old_one(cache: ChunkCache) -> None:
    _precache(cache, neighbours=Ranking(cache, a="bcd", c="abd", d="acb"))
    key = _identity(cache, "a").key()
    kept = _identity(cache, "d").key()
    result = cache.put("b", "The tower has been closed for good.")
    assert result.status == "updated"
    assert result.unprepared_chunks == 2
    assert not _is_anywhere(cache, key)
    assert _is_anywhere(cache, kept)


def test_a_neighbour_that_goes_while_an_entry_is_computed(cache: ChunkCache) -> None:
    """The answer is given, and the entry kept in no tier."""
    _precache(cache)
    identity = _identity(cache, "a")
    plan = cache.plan(QUESTION, ["a"], AskOptions(policy="none"))
    cache.runtime.stack.drop([identity.key()])
    compute = cache.runtime.prefill.compute

    def interrupted(wanted: Any, codec: Any) -> Entry:
        entry = compute(wanted, codec)
        if wanted == identity:
            cache.delete("b")
        return entry

    cache.runtime.prefill.compute = interrupted
    answer = cache._serving.start(plan, AskOptions(max_tokens=2)).answer()
    assert len(answer.token_ids) == 2
    assert [w.code for w in answer.report.warnings] == ["not_stored_unowned"]
    assert not _is_anywhere(cache, identity.key())


def test_an_entry_that_the_catalog_could_not_note_stays_in_no_tier(
    cache: ChunkCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a full store nobody could find it again when a neighbour goes."""
    _precache(cache)
    identities = [_identity(cache, "a"), _identity(cache, "a", system="Be brief.")]
    cache.runtime.stack.drop([i.key() for i in identities])

    def full(self: Any, entry: Entry, guard: Any = None, **options: Any) -> bool:
        raise StoreFullError("full")

    monkeypatch.setattr(DiskTier, "put", full)
    for system in (None, "Be brief."):
        options = AskOptions(policy="none", max_tokens=2, system=system)
        answer = cache.answer(QUESTION, ["a"], options=options)
        assert [w.code for w in answer.report.warnings] == ["not_stored_store_full"]
    assert not any(_is_anywhere(cache, i.key()) for i in identities)


def test_tenants_do_not_see_each_other(cache: ChunkCache) -> None:
    other = ChunkCache(cache.runtime, tenant="other")
    for name in "ab":
        other.put(name, TEXTS[name])
    ranking = Ranking(cache, a="bcd")
    ranking.extra = [c for c, _, _ in other.catalog.chunks()]
    _precache(cache, "acd", neighbours=ranking)
    ids = {d: c for c, d, _ in cache.catalog.chunks()}
    assert _identity(cache, "a").behind == (ids["d"], ids["c"])
    before = _stored(cache)
    other.delete("a")
    assert len(before) - len(_stored(cache)) == 1, "their own entry alone"
    # The same texts behind the same neighbours are still two tenants' entries.
    _precache(other, "acd", neighbours=Ranking(other, a="cda"))
    theirs, ours = _identity(other, "a"), _identity(cache, "a")
    assert theirs.prefix_ids == ours.prefix_ids
    assert theirs.key() != ours.key()


def test_a_run_that_is_stopped_goes_on(cache: ChunkCache) -> None:
    asked = count()
    # Four items are stored, and one document is prepared.
    first = _precache(cache, should_stop=lambda: next(asked) == 5)
    assert first.interrupted
    assert (first.documents, first.prefilled_chunks) == (4, 1)
    second = _precache(cache)
    assert not second.interrupted
    assert second.prefilled_chunks == 3

    stopped = _precache(cache, "a", should_stop=lambda: True)
    assert (stopped.interrupted, stopped.documents) == (True, 0)


def test_progress_of_the_second_phase_is_told(cache: ChunkCache) -> None:
    told: list[Any] = []
    _precache(cache, on_progress=told.append)
    assert {p.chunks_to_prepare for p in told} == {0, 4}
    assert [p.prefilled_chunks for p in told if not p.chunks_to_prepare] == [0] * 4
    assert (told[-1].prepared_chunks, told[-1].prefilled_chunks) == (4, 4)


def test_neighbours_that_do_not_fit_a_longer_opening_fall_back(cache: ChunkCache) -> None:
    _precache(cache)
    # With this opening the prompt fits the model, but neighbours and chunk do not fit behind it.
    tokenizer = cache.runtime.model.tokenizer
    identity = _identity(cache, "a")
    own = len(tokenizer.encode_content(cache.runtime.system))
    room = 2048 - len(identity.prefix_ids) - len(identity.token_ids) + own
    longest = "a" + " a" * (room - 1)
    while len(tokenizer.encode_content(longest)) > room:
        longest = longest[:-2]
    assert _identity(cache, "a", system=longest).preparation == "neighbours(2)"
    assert _identity(cache, "a", system=longest + " a").preparation == "preamble"


def test_neighbours_that_do_not_fit_are_passed_over(
    open_prepared: Callable[..., ChunkCache],
) -> None:
    """Documents may have been cut under another setting, into chunks larger than now."""
    wide = open_prepared(chunk_tokens=700, preparation="alone")
    long_text = " ".join(f"{i % 10}" for i in range(330))
    wide.put("b", long_text)
    assert len(wide.get("b").chunks) == 1
    num_tokens = wide.get("b").num_tokens
    wide.close()
    cache = open_prepared(preparation="neighbours(4)")
    for i in range(3):
        cache.catalog.put(_renamed(cache, "b", f"b{i}", i), now=1.0)
    _precache(cache, "acd", neighbours=_Everything(cache))
    identity = _identity(cache, "a")
    assert len(identity.prefix_ids) + len(identity.token_ids) <= 2048
    assert identity.preparation == "neighbours(4)"
    assert num_tokens * 4 > 2048


class _Everything:
    """Ranks the longest chunks first."""

    def __init__(self, cache: ChunkCache) -> None:
        self._cache = cache

    def nearest(self, chunk_id: ChunkId) -> list[ChunkId]:
        ids = {c: d for c, d, _ in self._cache.catalog.chunks()}
        return sorted(ids, key=lambda c: -self._cache.get(ids[c]).num_tokens)


def _renamed(cache: ChunkCache, name: str, other: str, number: int) -> Any:
    """A copy of a document whose one chunk has one token more in front."""
    document = cache.get(name)
    (chunk,) = document.chunks
    ids = (17 + number, *chunk.token_ids)
    identifier = chunk_id(cache.catalog.namespace, document.tokenizer, ids)
    return replace(
        document, document_id=other, chunks=(replace(chunk, chunk_id=identifier, token_ids=ids),)
    )


def test_what_cannot_work_is_refused(
    open_prepared: Callable[..., ChunkCache], cache: ChunkCache
) -> None:
    with pytest.raises(InvalidValueError, match="finds neighbours") as caught:
        cache.precache([TextItem("a", TEXTS["a"])])
    assert caught.value.param == "neighbours"
    assert cache.list() == [], "refused before any work"
    with pytest.raises(InvalidValueError, match="do not fit the model's 2048 positions"):
        open_prepared(store="long", chunk_tokens=700)
    open_prepared(store="short", chunk_tokens=500, preparation="neighbours(2)").close()
