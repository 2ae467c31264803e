"""Case tests F15, F16 and X02: documents that shrink or go, and stored bytes that are an attack."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chunkcache.errors import DocumentNotFoundError
from chunkcache.planning import AskOptions
from chunkcache.store.transaction import Database
from chunkcache.upkeep.verify import verify

Caches = Callable[..., Any]


def _sentences(*numbers: int) -> str:
    return " ".join(f"House {n} has {n * 31} windows and {n * 7} keys in all." for n in numbers)


def _num_keys(cache: Any) -> dict[str, int]:
    with cache.runtime.env.read() as txn:
        return {d.value: txn.num_entries(d) for d in (Database.CHUNKS, Database.ENTRIES)}


def test_F15_a_shorter_version_leaves_nothing_of_the_longer_one(open_cache: Caches) -> None:
    """Chunks and entries that only the old version had are gone; those of both are not redone."""
    cache = open_cache()
    cache.put("d", _sentences(*range(10)))
    num_before = _num_keys(cache)["chunks"]
    result = cache.put("d", _sentences(*range(4)))
    assert result.reused_chunks > 0
    num_chunks = len(cache.get("d").chunks)
    assert num_chunks < num_before
    assert _num_keys(cache) == {"chunks": num_chunks, "entries": num_chunks}
    assert verify(cache.runtime.env).findings == ()


def test_F16_a_deleted_document_is_in_no_tier_and_its_id_inherits_nothing(
    open_cache: Caches,
) -> None:
    """Delete says what went; the id, taken again, answers from the new text alone."""
    cache = open_cache()
    cache.put("d", "The secret code of the vault is 90210, and nobody else may know it at all.")
    cache.answer("Which code?", ["d"], max_tokens=2)
    identities = cache.plan("", ["d"], AskOptions()).identities
    assert cache.runtime.stack.stats().entries["host"] == len(identities)
    removed = cache.delete("d")
    assert removed.removed_entries == len(identities)
    stats = cache.runtime.stack.stats()
    assert stats.entries == {"host": 0, "disk": 0}
    with pytest.raises(DocumentNotFoundError):
        cache.answer("Which code?", ["d"], max_tokens=2)
    cache.put("d", "The park opens at seven in the morning and is closed again at dusk.")
    fresh = open_cache("fresh")
    fresh.put("d", "The park opens at seven in the morning and is closed again at dusk.")
    answers = [c.answer("Which code?", ["d"], max_tokens=6).token_ids for c in (cache, fresh)]
    assert answers[0] == answers[1]
    keys = {i.key() for i in identities}
    with cache.runtime.env.read() as txn:
        left = {key for d in Database for key, _ in txn.scan(d)}
        assert not keys & {k[-32:] for k in left}
        assert all(b"90210" not in bytes(value) for d in Database for _, value in txn.scan(d))


class _Bomb:
    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self._target,)


@pytest.mark.parametrize("database", list(Database))
def test_X02_a_pickle_in_place_of_any_value_is_never_run(
    open_cache: Caches, tmp_path: Path, database: Database
) -> None:
    """An entry is a counted miss; a record is an error by name. Nothing is executed."""
    marker = tmp_path / "executed"
    payload = pickle.dumps(_Bomb(marker))
    cache = open_cache(host_tier_bytes=0)
    cache.put("d", _sentences(1, 2))
    expected = cache.answer("Which?", ["d"], max_tokens=2).token_ids

    def spoil(txn: Any) -> None:
        for key in [key for key, _ in txn.scan(database) if key != b"manifest"]:
            txn.put(database, key, payload)

    cache.runtime.env.update(spoil)
    if database is Database.ENTRIES:
        assert cache.answer("Which?", ["d"], max_tokens=2).token_ids == expected
        assert cache.runtime.stack.stats().quarantined > 0
    report = verify(cache.runtime.env)
    assert report.is_sound == (database not in (Database.DOCUMENTS, Database.CHUNKS))
    cache.close()
    reopened = open_cache(host_tier_bytes=0)
    assert verify(reopened.runtime.env, repair=True).is_sound
    assert reopened.put("d", _sentences(1, 2)).status in ("created", "unchanged")
    assert reopened.answer("Which?", ["d"], max_tokens=2).token_ids == expected
    assert not marker.exists()
