"""Case tests, area L: the store fills, grows, is shared, and says what is wrong with it."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chunkcache.documents import MAX_DOCUMENT_ID_CHARS, Chunk, Document
from chunkcache.entry import Entry
from chunkcache.errors import (
    InvalidValueError,
    StoreError,
    StoreFullError,
    StoreLockedError,
)
from chunkcache.identity import EntryIdentity, ModelDigest, TenantNamespace, chunk_id
from chunkcache.planning import AskOptions
from chunkcache.precache import NUM_DOCUMENTS_IN_FLIGHT, TextItem
from chunkcache.store import environment
from chunkcache.store.disk import DiskTier
from chunkcache.store.environment import FREEING_ROOM_BYTES, StoreEnvironment
from chunkcache.store.transaction import Database

Caches = Callable[..., Any]
Passages = dict[str, str]
FAT = {"num_key_value_heads": 4, "head_dim": 128}
"""A tiny model whose entries are large: 8 KiB a token, so that a small store fills soon."""


def make_entry(number: int, num_kib: int = 256) -> Entry:
    ids = tuple(range(number * 64, number * 64 + 64))
    identity = EntryIdentity(
        ModelDigest(b"m" * 32), TenantNamespace(b"n" * 32), "alone", (), "raw32", ids
    )
    k = torch.full((1, 64, 1, num_kib * 2), float(number))
    return Entry(identity, identity.key(), k, -k)


def _hits(cache: Any, name: str) -> bool:
    answer = cache.answer("Which?", [name], policy="none", max_tokens=1)
    return {d.source for d in answer.report.documents} <= {"host", "disk"}


def _numbers(prefix: str, count: int) -> str:
    return " ".join(f"{prefix}-{n * 7919 % 100_003}" for n in range(count))


def test_L01_two_processes_outgrow_one_map(run_child: Any, tmp_path: Path) -> None:
    """Two processes that fill one store past its first map lose nothing and damage nothing."""
    script = """
import torch
from chunkcache.entry import Entry
from chunkcache.identity import EntryIdentity
from chunkcache.store.disk import DiskTier
children = []
for name in (1, 2):
    if not (pid := os.fork()):
        with StoreEnvironment.open(Path(store), max_bytes=1 << 30) as env:
            for i in range(45):
                identity = EntryIdentity(b"m" * 32, b"n" * 32, "alone", (), "raw32", (name, i))
                k = torch.full((1, 2, 1, 102_400), float(i))
                assert DiskTier(env).put(Entry(identity, identity.key(), k, k + name))
        os._exit(0)
    children.append(pid)
assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
"""
    run_child(script, store=tmp_path / "store")
    with StoreEnvironment.open(tmp_path / "store", max_bytes=1 << 30) as env:
        assert env.map_bytes > environment.INITIAL_MAP_BYTES
        disk = DiskTier(env)
        assert disk.num_entries == 90
        assert disk.check_integrity() == []


def test_L02_a_batch_that_does_not_fit(open_cache: Caches, model_dir: Any) -> None:
    """A run over a generator ends with an error once the store is full, never short in silence.

    What it reported as done is there whole.
    """
    cache = open_cache(model=model_dir(**FAT), codec="raw", store_max_bytes=16 << 20)
    done: list[int] = []
    given: list[int] = []

    def items() -> Any:
        for index in range(1000):
            given.append(index)
            yield TextItem(f"doc-{index:03}", _numbers(str(index), 12))

    with pytest.raises(StoreFullError):
        cache.precache(items(), on_progress=lambda progress: done.append(progress.documents))
    assert 5 < done[-1] <= len(given) < 60
    stored = [d.document_id for d in cache.list()]
    incomplete = [name for name in stored if not _is_whole(cache, name)]
    assert len(stored) - len(incomplete) >= done[-1]
    assert len(incomplete) <= NUM_DOCUMENTS_IN_FLIGHT


def _is_whole(cache: Any, name: str) -> bool:
    identities = cache.plan("", [name], AskOptions()).identities
    with cache.runtime.env.read() as txn:
        return all(txn.get(Database.ENTRIES, i.key()) is not None for i in identities)


def test_L03_growth_under_a_slow_reader(
    open_cache: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the map grows again and again, readers see every key that was there when they began."""
    monkeypatch.setattr(environment, "INITIAL_MAP_BYTES", 1 << 20)
    cache = open_cache()
    env, disk = cache.runtime.env, DiskTier(cache.runtime.env)
    sizes = {env.map_bytes}
    num_written = 0
    missing: list[int] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            least = num_written
            with env.read() as txn:
                seen = 0
                for _ in txn.scan(Database.ENTRIES):
                    seen += 1
                    time.sleep(0.001)
            if seen < least:
                missing.append(least - seen)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(24):
        disk.put(make_entry(number, 512))
        num_written += 1
        sizes.add(env.map_bytes)
    stop.set()
    for thread in threads:
        thread.join()
    assert not missing
    assert len(sizes) >= 5
    assert disk.check_integrity() == []


def test_L04_one_store_opened_twice(open_cache: Caches, passages: Passages, tmp_path: Path) -> None:
    """A second opening in one process is refused under any name of the path; the first goes on."""
    first = open_cache()
    first.put("tower", passages["tower"])
    (tmp_path / "link").symlink_to("store")
    (tmp_path / "folder").mkdir()
    for other in ("store", "link", "folder/../store", "./link"):
        with pytest.raises(StoreLockedError):
            open_cache(other)
    assert _hits(first, "tower")
    assert first.put("bridge", passages["bridge"]).status == "created"
    first.close()
    again = open_cache("link")
    assert _hits(again, "tower")
    assert _hits(again, "bridge")


def test_L06_readers_that_were_killed(
    open_cache: Caches, run_child: Any, passages: Passages, tmp_path: Path
) -> None:
    """Processes killed inside a read leave no slot behind once the store is opened again."""
    cache = open_cache()
    cache.put("tower", passages["tower"])
    cache.close()
    script = """
def body(report):
    env = StoreEnvironment.open(Path(store), max_bytes=1 << 30)
    with env.read():
        report()
        signal.pause()

for _ in range(40):
    killed_after(1, body)
"""
    run_child(script, store=tmp_path / "store")
    cache = open_cache()
    assert _hits(cache, "tower")
    assert cache.put("bridge", passages["bridge"]).status == "created"
    # The first line is a heading; one slot is this process's own.
    assert cache.runtime.env._lmdb().readers().strip().count("\n") <= 1


def test_L07_a_disk_without_room(
    run_child: Any, model_dir: Any, cache_dir: Path, tmp_path: Path
) -> None:
    """Where the disk is full a put fails by name, hits are served, and room makes it work again."""
    script = """
import resource
from chunkcache.errors import StoreFullError
settings = {"cache_dir": cache_dir, "chunk_tokens": 24, "preparation": "alone", "codec": "raw",
            "min_fused_context_tokens": 0, "min_mean_chunk_tokens": 0, "kept_prompts_ratio": 0.0}

def sources(name):
    answer = cache.answer("Which?", [name], policy="none", max_tokens=2)
    return {d.source for d in answer.report.documents}, answer.token_ids

with ChunkCache.open(store, model, host_tier_bytes=0, **settings) as cache:
    cache.put("before", texts[0])
    expected = sources("before")
    assert expected[0] == {"disk"}, expected
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    used = cache.runtime.env.file_bytes
    resource.setrlimit(resource.RLIMIT_FSIZE, (used + 500_000, hard))
    for _ in range(2):
        try:
            cache.put("too much", texts[1])
        except StoreFullError as error:
            assert error.status == 507
        else:
            raise AssertionError("a full disk was not noticed")
        assert sources("before") == expected
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    cache.put("too much", texts[1])
    assert sources("too much")[0] == {"disk"}
    assert sources("before") == expected
print("done", flush=True)
"""
    output = run_child(
        script,
        store=tmp_path / "store",
        model=model_dir(**FAT),
        cache_dir=cache_dir,
        texts=[_numbers("a", 10), _numbers("b", 40)],
    )
    assert output.endswith("done\n")


def test_L10_the_file_stays_within_its_bound(tmp_path: Path) -> None:
    """Written and deleted over and over, the file stays near its cap, live bytes told apart.

    A reader that stays open keeps freed pages from use: then writes are refused in time, and go on
    once it has left. A compact copy gives the space back.
    """
    cap = 24 << 20
    with StoreEnvironment.open(tmp_path / "store", max_bytes=cap) as env:
        disk = DiskTier(env)

        def fill_and_empty(num_rounds: int) -> int:
            num_refused = 0
            for number in range(num_rounds):
                entries = [make_entry(number * 100 + i, 1024) for i in range(6)]
                for entry in entries:
                    try:
                        disk.put(entry)
                    except StoreFullError:
                        num_refused += 1
                disk.delete_many(e.key for e in entries)
            return num_refused

        assert fill_and_empty(6) == 0
        assert env.file_bytes <= 1.5 * cap
        assert disk.num_bytes < env.file_bytes // 10

        entered, leave = threading.Event(), threading.Event()

        def read() -> None:
            with env.read():
                entered.set()
                leave.wait()

        reader = threading.Thread(target=read)
        reader.start()
        entered.wait()
        fill_and_empty(6)
        assert env.file_bytes <= cap + FREEING_ROOM_BYTES
        leave.set()
        reader.join()
        assert fill_and_empty(2) == 0
        disk.put(make_entry(9_999, 1024))
        env.compact_to(tmp_path / "compact")
        with StoreEnvironment.open(tmp_path / "compact", max_bytes=cap) as copy:
            assert copy.file_bytes < env.file_bytes
            assert DiskTier(copy).num_entries == 1


@pytest.mark.parametrize(
    "document_id",
    ["x" * 512, "🗝" * 200, "ž" * MAX_DOCUMENT_ID_CHARS, "../../x"],
    ids=lambda name: f"{name[:2]!r} x {len(name)}",
)
def test_L11_ids_of_any_length(open_cache: Caches, passages: Passages, document_id: str) -> None:
    """An id is opaque: long or odd, it is stored and found; neighbours are not touched."""
    cache = open_cache()
    items = [("left", "tower"), (document_id, "bridge"), ("right", "harbour")]
    summary = cache.precache([TextItem(name, passages[text]) for name, text in items])
    assert (summary.created, summary.failures) == (3, ())
    assert {d.document_id for d in cache.list()} == {name for name, _ in items}
    assert cache.get(document_id).text == passages["bridge"]
    assert _hits(cache, document_id)
    cache.delete(document_id)
    assert {d.document_id for d in cache.list()} == {"left", "right"}


@pytest.mark.parametrize("document_id", ["", "x" * 10_000, "a\x00b", "\ud800"], ids=repr)
def test_L11_ids_that_cannot_be(open_cache: Caches, passages: Passages, document_id: str) -> None:
    """An id that is refused is refused by name; the rest of its batch is stored."""
    cache = open_cache()
    with pytest.raises(InvalidValueError) as caught:
        cache.put(document_id, passages["tower"])
    assert caught.value.param == "document_id"
    items = [TextItem(name, passages["tower"]) for name in ("left", document_id, "right")]
    summary = cache.precache(items)
    assert [f.code for f in summary.failures] == ["invalid_value"]
    assert {d.document_id for d in cache.list()} == {"left", "right"}


def test_L12_large_metadata_and_many_chunks(open_cache: Caches, passages: Passages) -> None:
    """Kilobytes of metadata and thousands of chunks come back as they were given."""
    cache = open_cache()
    metadata = {"notes": "x" * 3_000, "nested": {"list": list(range(500)), "null": None}}
    cache.put("tower", passages["tower"], metadata)
    namespace, tokenizer = cache.catalog.namespace, cache.runtime.model.tokenizer.digest
    chunks = tuple(
        Chunk(chunk_id(namespace, tokenizer, (i, 5)), i, i + 1, (i, 5)) for i in range(3_000)
    )
    many = Document("many", "x" * 3_000, metadata, chunks, tokenizer, "by hand")
    cache.catalog.put(many, now=1.0)
    cache.close()
    restarted = open_cache()
    assert restarted.get("tower").metadata == metadata
    assert restarted.get("many").chunks == chunks
    assert restarted.catalog.count() == 2


def test_L16_a_place_that_cannot_hold_a_store(
    open_cache: Caches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no usable directory is refused at start, with the path, before a model is loaded."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr("chunkcache.model_opening.load_model", load)
    (tmp_path / "file").write_text("not a directory")
    (tmp_path / "loop").symlink_to("loop")
    places = ["file", "file/store", "loop"]
    (tmp_path / "closed").mkdir(mode=0o500)
    if os.geteuid():  # root may write everywhere
        places += ["closed", "closed/store"]
    for place in places:
        with pytest.raises(StoreError, match=place):
            open_cache(place)
