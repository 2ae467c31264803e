"""A store that is opened for reading alone: answers work, nothing in it changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chunkcache.errors import StoreError, StoreReadOnlyError
from chunkcache.precache import TextItem
from chunkcache.store.tier import NotStored

OpenCache = Callable[..., Any]


@pytest.fixture
def stored(open_cache: OpenCache, passages: dict[str, str]) -> None:
    cache = open_cache()
    for name, text in passages.items():
        cache.put(name, text)
    cache.answer("Which code?", ["tower"], max_tokens=2)
    cache.close()


def test_answers_come_from_the_store_and_it_stays_as_it_is(
    stored: None, open_cache: OpenCache, tmp_path: Path
) -> None:
    before = (tmp_path / "store" / "data.mdb").read_bytes()
    writing = open_cache()
    expected = writing.answer("Which code?", ["tower", "bridge"], max_tokens=4)
    writing.close()
    cache = open_cache(read_only=True)
    answer = cache.answer("Which code?", ["tower", "bridge"], max_tokens=4)
    assert answer.token_ids == expected.token_ids
    assert {d.source for d in answer.report.documents} == {"disk"}
    assert not answer.report.warnings
    cache.close()
    assert (tmp_path / "store" / "data.mdb").read_bytes() == before


def test_a_miss_is_computed_and_the_answer_says_that_it_was_not_kept(
    stored: None, open_cache: OpenCache
) -> None:
    cache = open_cache(read_only=True, codec="raw")
    answer = cache.answer("Which code?", ["tower"], max_tokens=2)
    assert {w.code for w in answer.report.warnings} == {"not_stored_read_only"}
    assert answer.report.account.cache_write_tokens == 0
    stats = cache.runtime.stack.stats()
    assert stats.not_stored == {NotStored.READ_ONLY: stats.prefills}
    again = cache.answer("Which code?", ["tower"], max_tokens=2)
    assert {d.source for d in again.report.documents} == {"host"}
    assert again.token_ids == answer.token_ids


def test_whatever_would_change_it_is_refused_with_one_code(
    stored: None, open_cache: OpenCache, passages: dict[str, str]
) -> None:
    cache = open_cache(read_only=True)
    for change in (
        lambda: cache.put("tower", "another text"),
        lambda: cache.put("new", passages["tower"]),
        lambda: cache.delete("tower"),
        lambda: cache.precache([TextItem("new", "text")]),
    ):
        with pytest.raises(StoreReadOnlyError) as refused:
            change()
        assert (refused.value.code, refused.value.status) == ("store_read_only", 403)
    assert [d.document_id for d in cache.list()] == sorted(passages)


def test_a_document_cut_with_another_tokenizer_is_cut_again_for_the_answer_alone(
    stored: None, open_cache: OpenCache
) -> None:
    cache = open_cache(read_only=True)
    digest = cache.get("tower").tokenizer
    cache.runtime.model.tokenizer.digest = b"u" * 32
    answer = cache.answer("Which code?", ["tower"], max_tokens=2)
    assert "tokenizer_changed" in {w.code for w in answer.report.warnings}
    assert cache.get("tower").tokenizer == digest


def test_no_store_is_made(open_cache: OpenCache, tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        open_cache("absent", read_only=True)
    assert not (tmp_path / "absent").exists()
