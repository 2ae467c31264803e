"""Case tests, area K: what was computed by or for something else is never served."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from chunkcache.errors import InvalidValueError, ModelFilesError
from chunkcache.identity import (
    ChunkKey,
    EntryIdentity,
    ModelDigest,
    TenantNamespace,
    encode_token_ids,
)
from chunkcache.planning import AskOptions
from chunkcache.store.entry_format import MAGIC, PREFIX_BYTES
from chunkcache.store.transaction import Database

QUESTION = "Who keeps the key to the tower?"
Caches = Callable[..., Any]
Passages = dict[str, str]


def _fill(cache: Any, passages: Passages) -> list[str]:
    for name, text in passages.items():
        cache.put(name, text)
    return list(passages)


def _sources(answer: Any) -> set[str]:
    return {d.source for d in answer.report.documents}


def _with_format(value: bytes, version: object) -> bytes:
    """A stored entry with another format version, sound in every other way."""
    header_end = PREFIX_BYTES + int.from_bytes(value[len(MAGIC) : PREFIX_BYTES], "little")
    header = msgspec.msgpack.decode(value[PREFIX_BYTES:header_end])
    payload = value[len(value) - header["payload_bytes"] :]
    if version is None:
        del header["format"]
    else:
        header["format"] = version
    encoded = msgspec.msgpack.encode(header)
    front = MAGIC + len(encoded).to_bytes(4, "little") + encoded
    front += xxhash.xxh3_64_digest(front)
    return front.ljust(-(-len(front) // 64) * 64, b"\0") + payload


@pytest.mark.parametrize("version", [0, 1, 3, "2", 2.5, True, None], ids=repr)
def test_K04_another_format_version(
    open_cache: Caches, passages: Passages, version: object
) -> None:
    """An entry of any other format, or of none, is computed again, with a reason, and replaced."""
    cache = open_cache(host_tier_bytes=0)
    cache.put("tower", passages["tower"])
    sound = cache.answer(QUESTION, ["tower"], policy="none")
    keys = [i.key() for i in cache.plan(QUESTION, ["tower"], AskOptions()).identities]

    def rewrite(txn: Any) -> None:
        for key in keys:
            value = _with_format(bytes(txn.get(Database.ENTRIES, key)), version)
            txn.put(Database.ENTRIES, key, value)

    cache.runtime.env.update(rewrite)
    met = cache.answer(QUESTION, ["tower"], policy="none")
    assert _sources(met) == {"computed"}
    assert {w.code for w in met.report.warnings} == {"miss_format_version"}
    assert cache.runtime.stack.stats().misses["format_version"] == len(keys)
    assert met.token_ids == sound.token_ids
    assert _sources(cache.answer(QUESTION, ["tower"], policy="none")) == {"disk"}


def test_K06_another_tokenizer(open_cache: Caches, change_model: Any, passages: Passages) -> None:
    """Under another tokenizer a document is cut anew, and nothing of its old form is used."""
    cache = open_cache()
    names = _fill(cache, passages)
    old_ids = {c.token_ids for n in names for c in cache.get(n).chunks}
    cache.close()

    def drop_merge(definition: dict[str, Any]) -> None:
        merges = definition["model"]["merges"]
        del merges[next(i for i, pair in enumerate(merges) if "".join(pair) == "\u0120the")]

    model = change_model("one-merge-less", tokenizer=drop_merge)
    changed = open_cache(model=model)
    answer = changed.answer(QUESTION, names)
    assert _sources(answer) == {"computed"}
    assert {w.code for w in answer.report.warnings} == {"tokenizer_changed"}
    assert {w.document_id for w in answer.report.warnings} == set(names)
    tokenizer = changed.runtime.model.tokenizer
    plan = changed.plan(QUESTION, names, AskOptions())
    for segment in plan.layout.chunks:
        assert segment.chunk is not None
        document = changed.get(segment.chunk.document_id)
        chunk = document.chunks[segment.chunk.chunk_index]
        assert segment.token_ids == tokenizer.encode_content(document.chunk_text(chunk))
    assert not {s.token_ids for s in plan.layout.chunks} <= old_ids
    changed.close()

    reverted = open_cache()
    result = reverted.put("tower", passages["tower"])
    assert result.status == "updated"
    assert result.reused_chunks == 0
    assert _sources(reverted.answer(QUESTION, ["tower"])) == {"host"}


BASE = EntryIdentity(ModelDigest(b"m"), TenantNamespace(b"n"), "alone", (), "bf16", (1, 23))
ids_lists = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=12)


def _key(token_ids: Any) -> ChunkKey:
    return replace(BASE, token_ids=token_ids).key()


@given(ids_lists, ids_lists)
def test_K07_keys_of_token_ids(a: list[int], b: list[int]) -> None:
    """Keys are long digests: equal for equal ids in any container, different for different ids."""
    assert (_key(tuple(a)) == _key(tuple(b))) == (a == b)
    assert _key(tuple(a)) != _key((*a, 0))
    assert len(_key(tuple(a))) == 32
    containers: list[Any] = [a, np.array(a, dtype=np.int64), torch.tensor(a, dtype=torch.int64)]
    for container in containers:
        assert encode_token_ids(container) == encode_token_ids(tuple(a))
    assert len({_key(ids) for ids in ((1, 23), (12, 3), (0,), (0, 0))}) == 4
    for bad in ((True, 1), (np.True_, 1), (), (1.0, 1), ("1",)):
        with pytest.raises(InvalidValueError):
            _key(bad)


def test_K09_keys_do_not_depend_on_the_process(
    open_cache: Caches,
    run_child: Any,
    model_dir: Any,
    cache_dir: Path,
    tmp_path: Path,
    passages: Passages,
) -> None:
    """What an offline job wrote under another hash seed is found, all of it, under the same keys."""
    script = """
settings = {"cache_dir": cache_dir, "chunk_tokens": 24, "preparation": "alone"}
with ChunkCache.open(store, model, **settings) as cache:
    summary = cache.precache([TextItem(name, text) for name, text in passages.items()])
    print(summary.prefilled_chunks, os.environ["PYTHONHASHSEED"], flush=True)
"""
    output = run_child(
        script,
        store=tmp_path / "store",
        model=model_dir(),
        cache_dir=cache_dir,
        passages=passages,
    )
    num_chunks, seed = output.split()[-2:]
    assert seed != os.environ.get("PYTHONHASHSEED")
    cache = open_cache()
    names = list(passages)
    identities = cache.plan(QUESTION, names, AskOptions()).identities
    assert len(identities) == int(num_chunks)
    with cache.runtime.env.read() as txn:
        stored = {key for key, _ in txn.scan(Database.ENTRIES)}
    assert stored == {i.key() for i in identities}
    assert _sources(cache.answer(QUESTION, names)) == {"disk"}
    assert cache.runtime.stack.stats().prefills == 0


def _note(index: int) -> str:
    code = index * 7919 % 10_000
    return f"Note {index}: the code of door {index} is {code}. It leads to room {code * 3}."


def test_K10_entries_are_found_after_a_restart(
    open_cache: Caches, model_dir: Any, tmp_path: Path
) -> None:
    """A restarted process finds every entry and writes nothing at all for them."""
    model = model_dir(max_position_embeddings=2048)
    cache = open_cache(model=model)
    names = [f"note-{i}" for i in range(25)]
    for index, name in enumerate(names):
        cache.put(name, _note(index))
    num_entries = cache.runtime.stack.stats().entries["disk"]
    assert num_entries >= 50
    cache.close()
    data = tmp_path / "store" / "data.mdb"
    before = data.read_bytes()

    restarted = open_cache(model=model)
    for start in range(0, 25, 5):
        answer = restarted.answer("Which code?", names[start : start + 5], max_tokens=1)
        assert _sources(answer) == {"disk"}
    for index, name in enumerate(names):
        assert restarted.put(name, _note(index)).status == "unchanged"
    stats = restarted.runtime.stack.stats()
    assert (stats.hits["disk"], stats.prefills, stats.stored) == (num_entries, 0, 0)
    restarted.close()
    assert data.read_bytes() == before


@pytest.mark.parametrize("same_length", [True, False])
def test_K11_an_entry_filed_under_anothers_key(open_cache: Caches, same_length: bool) -> None:
    """A sound entry of other tokens under a chunk's key is not believed: token ids decide."""
    cache = open_cache(host_tier_bytes=0)
    cache.put("a", "The code of the red door is 4017.")
    cache.put("b", "The door of the red code is 4017." if same_length else "It is closed.")
    sound = cache.answer(QUESTION, ["a"], policy="none")
    (a,), (b,) = (cache.plan("", [name], AskOptions()).identities for name in ("a", "b"))
    assert (len(a.token_ids) == len(b.token_ids)) == same_length

    def misfile(txn: Any) -> None:
        txn.put(Database.ENTRIES, a.key(), bytes(txn.get(Database.ENTRIES, b.key())))

    cache.runtime.env.update(misfile)
    met = cache.answer(QUESTION, ["a"], policy="none")
    assert met.token_ids == sound.token_ids
    assert [w.code for w in met.report.warnings] == ["miss_token_ids_mismatch"]
    assert cache.runtime.stack.stats().misses["token_ids_mismatch"] == 1
    assert _sources(cache.answer(QUESTION, ["a"], policy="none")) == {"disk"}


def test_K12_answers_survive_a_restart(open_cache: Caches) -> None:
    """Cold, warm, and after a restart: the same logits to the bit, for facts all over a text."""
    facts = {f"door {i}": f"{i * 104_729 % 900_000 + 100_000}" for i in range(5)}
    text = " ".join(f"The code of {d} is {c}. It was set by the porter." for d, c in facts.items())
    questions = [f"What is the code of {door}?" for door in facts]

    options = AskOptions(max_tokens=8)

    def ask(cache: Any) -> list[Any]:
        return [cache.stream(q, ["codes"], options).finished() for q in questions]

    cache = open_cache()
    cache.put("codes", text)
    keys = [i.key() for i in cache.plan("", ["codes"], AskOptions()).identities]
    cold = []
    for question in questions:
        cache.runtime.stack.drop(keys)
        cold.append(cache.stream(question, ["codes"], options).finished())
    warm = ask(cache)
    cache.close()
    restarted = ask(open_cache())
    for expected, source in ((cold, "computed"), (warm, "host"), (restarted[:1], "disk")):
        assert {d.source for f in expected for d in f.report.documents} == {source}
    for first, *others in zip(cold, warm, restarted, strict=True):
        assert all(torch.equal(o.first_logits, first.first_logits) for o in others)
        assert all(o.token_ids == first.token_ids for o in others)


@pytest.mark.parametrize("page_tokens", [1, 7, 32])
def test_K13_another_page_size_still_hits(
    open_cache: Caches, passages: Passages, page_tokens: int
) -> None:
    """Entries know nothing of pages: another page size hits and answers the same."""
    cache = open_cache(page_tokens=16)
    names = _fill(cache, passages)
    before = cache.stream(QUESTION, names, AskOptions(max_tokens=8)).finished()
    cache.close()
    other = open_cache(page_tokens=page_tokens)
    after = other.stream(QUESTION, names, AskOptions(max_tokens=8)).finished()
    assert {d.source for d in after.report.documents} == {"disk"}
    assert after.token_ids == before.token_ids
    assert (after.first_logits - before.first_logits).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
        {"rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_K13_another_architecture_over_the_same_weights_misses(
    open_cache: Caches, change_model: Any, passages: Passages, change: dict[str, Any]
) -> None:
    """The very same weight file, read with other heads or constants, is another model."""
    cache = open_cache()
    names = _fill(cache, passages)
    cache.close()
    model = change_model("reread", config=lambda config: config.update(change))
    changed = open_cache(model=model)
    met = changed.answer(QUESTION, names)
    assert _sources(met) == {"computed"}
    cold = open_cache("empty-store", model=model)
    _fill(cold, passages)
    assert cold.answer(QUESTION, names).token_ids == met.token_ids


def test_K13_heads_that_the_weights_do_not_have_are_refused(
    open_cache: Caches, change_model: Any
) -> None:
    """A configuration that contradicts the weights does not start."""
    model = change_model("wrong", config=lambda config: config.update(num_key_value_heads=1))
    with pytest.raises(ModelFilesError):
        open_cache(model=model)
