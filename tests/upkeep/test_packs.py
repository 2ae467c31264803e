"""Corpus packs: they come in as they went out, and what is not as it must be is refused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chunkcache.catalog_records import info_key, text_key
from chunkcache.errors import (
    ForeignPackError,
    InvalidValueError,
    StoreError,
    StoreFormatError,
    StoreReadOnlyError,
)
from chunkcache.identity import TenantNamespace
from chunkcache.planning import AskOptions
from chunkcache.store.entry_format import decode_entry, decode_header
from chunkcache.store.transaction import Database
from chunkcache.upkeep.pack_export import export_pack
from chunkcache.upkeep.pack_import import import_pack
from chunkcache.upkeep.verify import verify

NAMESPACE = TenantNamespace(b"n" * 32)
OpenCache = Callable[..., Any]


def export(cache: Any, target: Path, **options: Any) -> Any:
    return export_pack(cache.runtime.env, cache.catalog.namespace, target, **options)


def bring(cache: Any, pack: Path, **options: Any) -> Any:
    return import_pack(cache.runtime, cache.catalog, pack, **options)


def numbers(cache: Any) -> dict[tuple[str, tuple[int, ...], tuple[int, ...]], Any]:
    """Every entry's numbers by what it is, its tenant apart."""
    found = {}
    with cache.runtime.env.read() as txn:
        for _, value in txn.scan(Database.ENTRIES):
            identity = decode_header(value).identity()
            entry = decode_entry(value, identity)
            found[identity.preparation, identity.prefix_ids, identity.token_ids] = entry
    return found


def test_a_pack_comes_in_as_it_went_out(source, pack, open_cache, passages, tmp_path) -> None:
    cache = open_cache("other")
    assert cache.catalog.namespace != source.catalog.namespace
    report = bring(cache, pack)
    assert (report.documents, report.created, report.interrupted) == (4, 4, False)
    assert report.entries == len(numbers(source))
    ours, theirs = numbers(cache), numbers(source)
    assert ours.keys() == theirs.keys()
    assert all(
        torch.equal(e.k, theirs[i].k) and torch.equal(e.v, theirs[i].v) for i, e in ours.items()
    )
    for name in (*passages, "tower again"):
        mine, other = cache.get(name), source.get(name)
        assert (mine.text, mine.metadata, mine.chunking) == (
            other.text,
            other.metadata,
            other.chunking,
        )
        assert [(c.start, c.end, c.token_ids) for c in mine.chunks] == [
            (c.start, c.end, c.token_ids) for c in other.chunks
        ]
    answers = [c.answer("Which code?", ["tower", "bridge"], max_tokens=4) for c in (cache, source)]
    assert answers[0].token_ids == answers[1].token_ids
    assert {d.source for d in answers[0].report.documents} == {"disk"}
    assert verify(cache.runtime.env).findings == ()
    # What was put is put already.
    assert cache.put("tower", passages["tower"], {"of": "tower"}).status == "unchanged"
    assert sorted(p.name for p in pack.iterdir()) == ["000000.safetensors", "manifest.json"]
    for path in pack.iterdir():
        data = path.read_bytes()
        assert source.runtime.env.secret not in data
        assert source.catalog.namespace not in data


def test_again_changes_nothing(pack, open_cache) -> None:
    cache = open_cache("other")
    first = bring(cache, pack)
    generation = cache.catalog.generation()
    again = bring(cache, pack)
    assert (again.unchanged, again.entries, again.present_entries) == (4, 0, first.entries)
    assert cache.catalog.generation() == generation


def test_an_interrupted_import_goes_on(pack, open_cache) -> None:
    cache = open_cache("other")
    stops = iter([False, False, True])
    first = bring(cache, pack, should_stop=lambda: next(stops))
    assert (first.documents, first.interrupted) == (2, True)
    assert verify(cache.runtime.env).findings == ()
    rest = bring(cache, pack)
    assert (rest.unchanged, rest.created, rest.interrupted) == (2, 2, False)
    assert rest.present_entries == first.entries


def test_shards_of_bounded_size(source, open_cache, tmp_path) -> None:
    report = export(source, tmp_path / "small", shard_bytes=20_000)
    assert report.manifest.shards > 3
    names = sorted(os.listdir(tmp_path / "small"))
    assert names == [
        *(f"{i:06}.safetensors" for i in range(report.manifest.shards)),
        "manifest.json",
    ]
    cache = open_cache("other")
    assert bring(cache, tmp_path / "small").entries == report.manifest.entries


class Nearest:
    """Ranks chunks in the order of their ids."""

    def __init__(self, cache: Any) -> None:
        self._ids = sorted(c for c, _, _ in cache.catalog.chunks())

    def nearest(self, chunk_id: Any) -> Any:
        return self._ids


def test_entries_behind_their_neighbours(open_cache, passages, tmp_path, model_dir) -> None:
    model = model_dir(max_position_embeddings=2_048)
    cache = open_cache("source", model, preparation="neighbours(1)")
    for name, text in passages.items():
        cache.put(name, text)
    cache.precache(neighbours=Nearest(cache))
    report = export(cache, tmp_path / "pack")
    other = open_cache("other", model, preparation="neighbours(1)")
    brought = bring(other, tmp_path / "pack")
    assert brought.entries == report.manifest.entries
    assert brought.left_out_entries == 0
    assert verify(other.runtime.env).findings == ()
    plans = [c.plan("", sorted(passages), AskOptions()) for c in (cache, other)]
    assert [i.prefix_ids for i in plans[0].identities] == [
        i.prefix_ids for i in plans[1].identities
    ]
    answer = other.answer("Which code?", ["tower"], max_tokens=1)
    assert {d.source for d in answer.report.documents} == {"disk"}
    # A trace of a chunk goes with it here too.
    traced = {i.key() for i in plans[1].identities if i.behind}
    assert traced
    for name in passages:
        other.delete(name)
    assert numbers(other) == {}


def test_a_pack_of_another_model_is_refused_before_anything_is_written(
    pack, open_cache, model_dir
) -> None:
    cache = open_cache("other", model_dir(seed=7))
    with pytest.raises(ForeignPackError, match="model") as refused:
        bring(cache, pack)
    assert (refused.value.code, refused.value.status) == ("pack_foreign", 409)
    assert cache.list() == []


def test_a_store_open_for_reading_takes_no_pack(pack, open_cache) -> None:
    open_cache("other").close()
    with pytest.raises(StoreReadOnlyError):
        bring(open_cache("other", read_only=True), pack)


def test_expired_documents_neither_leave_nor_enter(source, pack, open_cache, tmp_path) -> None:
    source.put("short", "A text that lives for a while.", ttl_seconds=100)
    export(source, tmp_path / "more")
    expires_at = source.get("short").expires_at
    cache = open_cache("other")
    bring(cache, tmp_path / "more")
    assert cache.get("short").expires_at == expires_at
    source.catalog._clock = lambda: expires_at
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chunkcache.upkeep.pack_import.time.time", lambda: expires_at)
        late = bring(open_cache("late"), tmp_path / "more")
    assert (late.documents, late.expired, late.created) == (5, 1, 4)


def test_nothing_to_export(open_cache, tmp_path) -> None:
    with pytest.raises(InvalidValueError, match="no entries"):
        export(open_cache(), tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize(
    "key", [info_key(NAMESPACE, "first"), text_key(NAMESPACE, "first")], ids=["I", "T"]
)
def test_a_pack_that_would_lack_a_damaged_document_is_not_written(
    furnished, change, tmp_path, key
) -> None:
    change(furnished, Database.DOCUMENTS, key, lambda value: value[:-1])
    with pytest.raises(StoreFormatError, match="damaged"):
        export_pack(furnished.env, NAMESPACE, tmp_path / "pack", model="6d6d6d6d")
    assert not (tmp_path / "pack").exists()


def test_an_export_never_overwrites(source, pack) -> None:
    with pytest.raises(StoreError, match="there already"):
        export(source, pack)


def test_of_several_models_one_must_be_named(source, open_cache, model_dir, tmp_path) -> None:
    source.close()
    cache = open_cache("source", model_dir(seed=7))
    cache.answer("Which code?", ["tower"], max_tokens=1)
    with pytest.raises(InvalidValueError, match="name one of these models"):
        export(cache, tmp_path / "pack")
    digest = cache.runtime.model.runner.digest.hex()
    report = export(cache, tmp_path / "pack", model=digest[:10])
    assert report.manifest.model == digest
    assert report.manifest.entries == len(cache.get("tower").chunks)
