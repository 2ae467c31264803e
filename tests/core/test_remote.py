"""A remote tier under whole caches: two machines with one secret, and what people are told."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chunkcache.errors import InvalidValueError
from chunkcache.settings import load_settings
from chunkcache.settings_sources import explain_settings
from chunkcache.store.environment import StoreEnvironment

OpenCache = Callable[..., Any]
URL = "redis://user:hunter2@127.0.0.1:9/0"


def second_machine(tmp_path: Path) -> str:
    """An empty store with the first one's tenant secret."""
    (tmp_path / "second").mkdir()
    shutil.copy2(tmp_path / "store" / "secret.key", tmp_path / "second" / "secret.key")
    return "second"


def test_a_second_machine_answers_with_the_first_one_s_entries(
    open_cache: OpenCache, passages: dict[str, str], tmp_path: Path
) -> None:
    remote = (tmp_path / "remote").as_uri()
    first = open_cache(remote=remote)
    assert first.put("tower", passages["tower"]).prefilled_chunks > 0
    expected = first.answer("Which code?", ["tower"], max_tokens=4)
    first.close()
    second = open_cache(second_machine(tmp_path), remote=remote)
    second._current().ingest.store("tower", passages["tower"], {}, "text")
    answer = second.answer("Which code?", ["tower"], max_tokens=4)
    assert answer.token_ids == expected.token_ids
    assert {d.source for d in answer.report.documents} == {"remote"}
    assert answer.report.account.cached_tokens_by_source["remote"] > 0
    assert not answer.report.warnings
    stats = second.runtime.stack.stats()
    assert (stats.prefills, stats.remote.hits) == (0, stats.stored)
    second.delete("tower")
    second.close()
    assert not [path for path in (tmp_path / "remote").rglob("*") if path.is_file()]


def test_a_store_of_another_secret_finds_nothing(
    open_cache: OpenCache, passages: dict[str, str], tmp_path: Path
) -> None:
    remote = (tmp_path / "remote").as_uri()
    first = open_cache(remote=remote)
    first.put("tower", passages["tower"])
    first.close()
    other = open_cache("other", remote=remote)
    assert other.put("tower", passages["tower"]).prefilled_chunks > 0
    assert other.runtime.stack.stats().remote.hits == 0


def test_a_dead_remote_is_named_in_the_answer_and_costs_nothing_else(
    open_cache: OpenCache, passages: dict[str, str]
) -> None:
    cache = open_cache(remote=URL)
    cache._current().ingest.store("tower", passages["tower"], {}, "text")
    answer = cache.answer("Which code?", ["tower"], max_tokens=2)
    assert answer.token_ids
    assert {w.code for w in answer.report.warnings} == {"miss_remote_unavailable"}
    assert cache.runtime.remote.stats().address == "redis://***@127.0.0.1:9/0"
    assert not cache.runtime.remote.check()


def test_secrets_are_in_no_listing() -> None:
    settings = load_settings(remote=URL)
    assert "hunter2" not in repr(settings)
    shown = {s.name: s.value for s in explain_settings({"remote": URL})}
    assert shown["remote"] == "redis://***@127.0.0.1:9/0"


def test_a_url_that_is_none_is_refused_before_a_model_is_loaded(
    open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "chunkcache.runtime.load_configured_model", lambda *_: pytest.fail("loaded")
    )
    with pytest.raises(InvalidValueError, match="setting remote"):
        open_cache(remote="ftp://user:hunter2@host/x")
    with StoreEnvironment.open(tmp_path / "store", max_bytes=1 << 24):
        pass  # it was closed again
