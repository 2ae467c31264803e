"""Case tests L08, L13, L15, J01 and J03: killed, cut, damaged, resumed under other settings."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chunkcache.catalog_records import ChunkRecord
from chunkcache.entry import Entry
from chunkcache.planning import AskOptions
from chunkcache.precache import TextItem
from chunkcache.store.disk import DiskTier
from chunkcache.store.entry_format import decode_entry, decode_header
from chunkcache.store.records import decode_record
from chunkcache.store.transaction import Database

Caches = Callable[..., Any]
NUM_DOCUMENTS = 24


def _texts() -> dict[str, str]:
    return {
        f"doc-{i:03}": f"House {i} has {i * 31} windows. Its porter keeps {i * 7} keys. "
        f"The code of its door is {i * 7919 % 10_000}, and the bell rings {i % 5} times."
        for i in range(NUM_DOCUMENTS)
    }


PRECACHE = """
def body(report):
    settings = {"cache_dir": cache_dir, "chunk_tokens": chunk_tokens, "preparation": "alone",
                "store_max_bytes": 1 << 30}
    seen = 0
    def on_progress(progress):
        nonlocal seen
        while seen < progress.prefilled_chunks:
            seen += 1
            report()
    with ChunkCache.open(store, model, **settings) as cache:
        cache.precache([TextItem(n, t) for n, t in texts.items()], on_progress=on_progress)

for num_prefills in kills:
    killed_after(num_prefills, body)
"""


@pytest.fixture
def precache_and_kill(
    run_child: Any, model_dir: Any, cache_dir: Path, tmp_path: Path
) -> Callable[..., None]:
    """Runs the pre-caching job in children that are killed after so many prefills each."""

    def run(kills: list[int], *, chunk_tokens: int = 24) -> None:
        run_child(
            PRECACHE,
            store=tmp_path / "store",
            model=model_dir(),
            cache_dir=cache_dir,
            texts=_texts(),
            kills=kills,
            chunk_tokens=chunk_tokens,
        )

    return run


def _items() -> list[TextItem]:
    return [TextItem(name, text) for name, text in _texts().items()]


def _contents(cache: Any) -> dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]]:
    """Token ids of every stored entry, and its numbers."""
    found = {}
    with cache.runtime.env.read() as txn:
        for _, value in txn.scan(Database.ENTRIES):
            entry = decode_entry(value, decode_header(value).identity())
            found[entry.identity.token_ids] = (entry.k, entry.v)
    return found


def _check_whole(cache: Any) -> None:
    """Every entry is sound and owned by a chunk, every chunk by a document."""
    assert DiskTier(cache.runtime.env).check_integrity() == []
    documents = [cache.get(info.document_id) for info in cache.list(limit=1000)]
    owned = {c.chunk_id for d in documents for c in d.chunks}
    with cache.runtime.env.read() as txn:
        chunks = {
            key[-32:]: decode_record(value, ChunkRecord, "a chunk")
            for key, value in txn.scan(Database.CHUNKS)
        }
        entries = {key for key, _ in txn.scan(Database.ENTRIES)}
        for _, value in txn.scan(Database.ENTRIES):
            header = decode_header(value)
            assert header.shape[1] == len(header.identity().token_ids)
    assert set(chunks) == owned
    assert {key for record in chunks.values() for key in record.entry_keys} == entries


def test_L08_half_a_data_file(
    open_cache: Caches, run_child: Any, passages: dict[str, str], tmp_path: Path
) -> None:
    """A store whose file was cut is refused with what to do; moved away, an empty one starts."""
    cache = open_cache()
    for name, text in passages.items():
        cache.put(name, text)
    cache.close()
    data = tmp_path / "store" / "data.mdb"
    whole = data.read_bytes()
    script = """
from chunkcache.errors import StoreFormatError
try:
    StoreEnvironment.open(Path(store), max_bytes=1 << 30).close()
except StoreFormatError as error:
    print("refused:", error, flush=True)
"""
    for share in (0.5, 0.1, 0.8):
        data.write_bytes(whole[: int(share * len(whole))])
        output = run_child(script, store=data.parent)
        assert "refused:" in output
        assert "start empty" in output
    os.rename(tmp_path / "store", tmp_path / "broken")
    fresh = open_cache()
    assert fresh.list() == []
    assert fresh.put("tower", passages["tower"]).status == "created"


def test_L13_killed_at_any_moment(open_cache: Caches, precache_and_kill: Any) -> None:
    """After each kill all that is visible is whole: entries, their chunks, their documents."""
    for num_prefills in (1, 5, 14, 9):
        precache_and_kill([num_prefills])
        cache = open_cache()
        _check_whole(cache)
        cache.close()
    cache = open_cache()
    cache.precache(_items())
    _check_whole(cache)
    answer = cache.answer("Which code?", ["doc-003", "doc-019"], max_tokens=2)
    assert {d.source for d in answer.report.documents} <= {"host", "disk"}


def _cut(value: bytes, num_bytes: int) -> bytes:
    return value[:num_bytes]


def _flip(value: bytes, position: int) -> bytes:
    return value[:position] + bytes([value[position] ^ 0x40]) + value[position + 1 :]


@pytest.mark.parametrize("share", [0.0, 0.03, 0.3, 0.6, 0.999])
@pytest.mark.parametrize("damage", [_cut, _flip], ids=["cut", "flip"])
def test_L15_damage_is_met_once(
    open_cache: Caches, share: float, damage: Callable[[bytes, int], bytes]
) -> None:
    """An entry damaged anywhere is found out, computed again and replaced; from then on it hits."""
    cache = open_cache(host_tier_bytes=0)
    cache.put("note", "The code of the red door is 4017.")
    sound = cache.answer("Which code?", ["note"], policy="none", max_tokens=4)
    (identity,) = cache.plan("", ["note"], AskOptions()).identities

    def spoil(txn: Any) -> bytes:
        value = bytes(txn.get(Database.ENTRIES, identity.key()))
        txn.put(Database.ENTRIES, identity.key(), damage(value, int(share * len(value))))
        return value

    before = cache.runtime.env.update(spoil)
    sources = []
    for _ in range(3):
        answer = cache.answer("Which code?", ["note"], policy="none", max_tokens=4)
        assert answer.token_ids == sound.token_ids
        sources.append(answer.report.documents[0].source)
    assert sources == ["computed", "disk", "disk"]
    assert cache.runtime.stack.stats().quarantined == 1
    with cache.runtime.env.read() as txn:
        assert bytes(txn.get(Database.ENTRIES, identity.key()) or b"") == before


def test_J01_an_interrupted_run_goes_on(open_cache: Caches, precache_and_kill: Any) -> None:
    """The next run prefills only what was not stored; the store is then as if never interrupted."""
    whole = open_cache("uninterrupted")
    total = whole.precache(_items()).prefilled_chunks
    half = total // 2
    precache_and_kill([half])
    cache = open_cache()
    num_stored = len(_contents(cache))
    assert num_stored >= half - 1
    summary = cache.precache(_items())
    assert summary.prefilled_chunks == total - num_stored
    assert summary.documents == NUM_DOCUMENTS
    ours, theirs = _contents(cache), _contents(whole)
    assert ours.keys() == theirs.keys()
    for ids, tensors in ours.items():
        assert all(map(torch.equal, tensors, theirs[ids]))
    assert cache.precache(_items()).prefilled_chunks == 0
    _check_whole(cache)


@pytest.mark.parametrize("change", ["chunk size", "weights", "codec"])
def test_J03_resumed_under_other_settings(
    open_cache: Caches, model_dir: Any, precache_and_kill: Any, change: str
) -> None:
    """A run resumed with another chunk size, model or codec leaves no document half old, half new."""
    settings: dict[str, Any] = {
        "chunk size": {"chunk_tokens": 48},
        "weights": {"model": model_dir(seed=5)},
        "codec": {"codec": "raw"},
    }[change]
    precache_and_kill([20])
    resumed = open_cache(**settings)
    resumed.precache(_items())
    _check_whole(resumed)
    whole = open_cache("uninterrupted", **settings)
    whole.precache(_items())
    names = list(_texts())
    for name in names:
        ours, theirs = resumed.get(name), whole.get(name)
        assert ours.chunking == theirs.chunking
        assert [c.token_ids for c in ours.chunks] == [c.token_ids for c in theirs.chunks]
        plan = resumed.plan("", [name], AskOptions())
        for mine, other in zip(
            plan.identities, whole.plan("", [name], AskOptions()).identities, strict=True
        ):
            mine, other = (
                DiskTier(c.runtime.env).get(i) for c, i in ((resumed, mine), (whole, other))
            )
            assert isinstance(mine, Entry)
            assert isinstance(other, Entry)
            assert torch.equal(mine.k, other.k)
    if change == "chunk size":
        assert _contents(resumed).keys() == _contents(whole).keys()
