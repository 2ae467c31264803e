"""Invariant 10: a damaged, vanished or foreign entry is a counted miss, never a wrong answer."""

from collections.abc import Callable
from typing import Any

import pytest

from chunkcache.planning import AskOptions
from chunkcache.store.transaction import Database

QUESTION = "Who keeps the key?"


def _flip(value: bytes) -> bytes:
    middle = len(value) - len(value) // 4
    return value[:middle] + bytes([value[middle] ^ 0xFF]) + value[middle + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "flipped": _flip,
    "halved": lambda value: value[: len(value) // 2],
    "header_zeroed": lambda value: bytes(200) + value[200:],
    "emptied": lambda value: b"",
    "foreign": lambda value: b"\x80\x04\x95" + value[3:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_recomputed_and_replaced(
    open_cache: Callable[..., Any], passages: dict[str, str], damage: str
) -> None:
    cache = open_cache(host_tier_bytes=0)
    cache.put("tower", passages["tower"])
    sound = cache.answer(QUESTION, ["tower"], policy="none")
    key = cache.plan(QUESTION, ["tower"], AskOptions()).identities[0].key()

    def spoil(txn: Any) -> None:
        value = bytes(txn.get(Database.ENTRIES, key))
        txn.put(Database.ENTRIES, key, DAMAGE[damage](value))

    cache.runtime.env.update(spoil)
    met = cache.answer(QUESTION, ["tower"], policy="none")
    assert met.text == sound.text
    assert met.report.documents[0].source == "computed"
    assert met.report.warnings
    assert all(w.code.startswith("miss_") for w in met.report.warnings)
    stats = cache.runtime.stack.stats()
    assert stats.quarantined == 1
    after = cache.answer(QUESTION, ["tower"], policy="none")
    assert after.report.documents[0].source == "disk"
    assert not after.report.warnings
    assert after.text == sound.text


def test_a_vanished_entry_is_recomputed(
    open_cache: Callable[..., Any], passages: dict[str, str]
) -> None:
    cache = open_cache()
    cache.put("tower", passages["tower"])
    sound = cache.answer(QUESTION, ["tower"], policy="none")
    identities = cache.plan(QUESTION, ["tower"], AskOptions()).identities
    cache.runtime.stack.drop([i.key() for i in identities])
    met = cache.answer(QUESTION, ["tower"], policy="none")
    assert met.text == sound.text
    assert met.report.account.fused_tokens == 0
    assert met.report.account.cached_tokens == met.report.account.exact_prefix_tokens
    assert met.report.account.cache_write_tokens == met.report.documents[0].tokens
    assert cache.answer(QUESTION, ["tower"], policy="none").report.documents[0].source == "host"
