"""Corpus packs that somebody has spoilt: each is refused, and nothing of what is spoilt comes in."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from chunkcache.errors import ForeignPackError, PackError
from chunkcache.store.entry_format import decode_entry, decode_header, encode_entry
from chunkcache.store.records import decode_record, encode_record
from chunkcache.upkeep.pack_format import PackChunk, PackDocument
from chunkcache.upkeep.pack_import import import_pack
from chunkcache.upkeep.verify import verify


def bring(cache: Any, pack: Path) -> Any:
    return import_pack(cache.runtime, cache.catalog, pack)


def edit_manifest(pack: Path, **fields: Any) -> None:
    path = pack / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(pack: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    path = pack / "000000.safetensors"
    tensors = dict(load_file(path))
    change(tensors)
    save_file(tensors, path)


def edit_document(pack: Path, change: Callable[[PackDocument], PackDocument]) -> None:
    def apply(tensors: dict[str, np.ndarray]) -> None:
        name = "00000000.document"
        document = decode_record(tensors[name].tobytes(), PackDocument, "a document")
        tensors[name] = np.frombuffer(encode_record(change(document)), np.uint8)

    edit_tensors(pack, apply)


def edit_entry(pack: Path, change: Callable[[Any], Any]) -> None:
    def apply(tensors: dict[str, np.ndarray]) -> None:
        name = min(n for n in tensors if ".entry." in n)
        data = tensors[name].tobytes()
        entry = change(decode_entry(data, decode_header(data).identity()))
        entry = replace(entry, key=entry.identity.key())
        tensors[name] = np.frombuffer(encode_entry(entry), np.uint8)

    edit_tensors(pack, apply)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "other"},
        {"documents": 3},
        {"entries": 1},
        {"shards": 2},
        {"shards": -1},
        {"shards": 10**9},
        {"documents": "four"},
        {"model": None},
    ],
)
def test_a_manifest_that_is_none(pack, open_cache, fields) -> None:
    edit_manifest(pack, **fields)
    cache = open_cache("other")
    with pytest.raises(PackError) as refused:
        bring(cache, pack)
    assert refused.value.code == "pack_invalid"
    assert cache.list() == []


@pytest.mark.parametrize("fields", [{"format": 2}, {"entry_format": 99}, {"tokenizer": "00"}])
def test_a_manifest_of_another_format_or_tokenizer(pack, open_cache, fields) -> None:
    edit_manifest(pack, **fields)
    with pytest.raises(ForeignPackError):
        bring(open_cache("other"), pack)


def test_files_that_are_no_files(pack, open_cache, tmp_path) -> None:
    cache = open_cache("other")
    shard, secret = pack / "000000.safetensors", tmp_path / "secret"
    whole = shard.read_bytes()
    secret.write_bytes(whole)
    for spoil in (
        lambda: shard.write_bytes(whole[: len(whole) // 2]),
        lambda: shard.write_bytes(b""),
        lambda: shard.write_bytes((1 << 62).to_bytes(8, "little") + whole[8:]),
        lambda: shard.write_bytes(b"\x80\x04pickle" * 100),
        lambda: (shard.unlink(), shard.symlink_to(secret)),
        lambda: (shard.unlink(), shard.mkdir()),
    ):
        spoil()
        with pytest.raises(PackError):
            bring(cache, pack)
    shard.rmdir()
    with pytest.raises(PackError, match="cannot be read"):
        bring(cache, pack)
    (pack / "manifest.json").write_bytes(b"[" * 70_000)
    with pytest.raises(PackError, match="at most"):
        bring(cache, pack)
    with pytest.raises(PackError):
        bring(cache, tmp_path / "nowhere")
    assert cache.list() == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "document", "00000099.document", "x" * 500])
def test_names_that_no_pack_has(pack, open_cache, name) -> None:
    edit_tensors(pack, lambda tensors: tensors.update({name: np.zeros(4, np.uint8)}))
    edit_manifest(pack, documents=5)
    with pytest.raises(PackError):
        bring(open_cache("other"), pack)


@pytest.mark.parametrize("part", ["document", "entry"])
def test_a_flipped_byte_anywhere_is_found(pack, open_cache, part) -> None:
    def flip(tensors: dict[str, np.ndarray]) -> None:
        name = max(n for n in tensors if part in n)
        data = tensors[name].copy()
        data[len(data) // 2] ^= 1
        tensors[name] = data

    edit_tensors(pack, flip)
    cache = open_cache("other")
    with pytest.raises(PackError):
        bring(cache, pack)
    # What came before stays, whole; nothing of the damaged document does.
    assert len(cache.list()) < 4
    assert verify(cache.runtime.env).findings == ()


def _other_tokens(document: PackDocument) -> PackDocument:
    first = document.chunks[0]
    token_ids = first.token_ids[4:] + first.token_ids[:4]
    chunks = [PackChunk(first.start, first.end, token_ids), *document.chunks[1:]]
    return msgspec.structs.replace(document, chunks=chunks)


@pytest.mark.parametrize(
    "change",
    [
        _other_tokens,
        lambda d: msgspec.structs.replace(d, text=d.text.replace("e", "o")),
        lambda d: msgspec.structs.replace(d, text=d.text + " Ignore all this."),
        lambda d: msgspec.structs.replace(d, text="\x00" + d.text),
        lambda d: msgspec.structs.replace(d, chunks=d.chunks[1:]),
        lambda d: msgspec.structs.replace(d, chunks=[d.chunks[0], *d.chunks]),
        lambda d: msgspec.structs.replace(d, chunks=[]),
        lambda d: msgspec.structs.replace(d, document_id=""),
        lambda d: msgspec.structs.replace(d, document_id="tower"),
        lambda d: msgspec.structs.replace(d, metadata=b"[1]"),
        lambda d: msgspec.structs.replace(d, metadata=b"{"),
        lambda d: msgspec.structs.replace(d, chunking="x" * 300),
        lambda d: msgspec.structs.replace(d, expires_at=-1.0),
    ],
)
def test_a_document_that_does_not_agree_with_itself(pack, open_cache, change) -> None:
    edit_document(pack, change)
    cache = open_cache("other")
    with pytest.raises(PackError):
        bring(cache, pack)
    assert verify(cache.runtime.env).findings == ()


def _identity(**fields: Any) -> Callable[[Any], Any]:
    return lambda entry: replace(entry, identity=replace(entry.identity, **fields))


def _with_nan(entry: Any) -> Any:
    entry.k[0, 0, 0, 0] = float("nan")
    return entry


@pytest.mark.parametrize(
    "change",
    [
        _identity(model=b"x" * 32),
        _identity(namespace=b"x" * 32),
        _identity(preparation="somehow"),
        _identity(preparation="neighbours(1)"),
        lambda e: replace(e, k=e.k[:1], v=e.v[:1]),
        lambda e: replace(e, k=e.k[..., :8], v=e.v[..., :8]),
        _with_nan,
        lambda e: replace(
            e,
            identity=replace(e.identity, token_ids=e.identity.token_ids[1:]),
            k=e.k[:, 1:],
            v=e.v[:, 1:],
        ),
    ],
)
def test_an_entry_that_is_not_the_documents_or_the_models(pack, open_cache, change) -> None:
    edit_entry(pack, change)
    cache = open_cache("other")
    with pytest.raises(PackError):
        bring(cache, pack)
    # The document that it came with is not there either.
    assert cache.list() == []
    assert verify(cache.runtime.env).findings == ()
