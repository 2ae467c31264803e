"""Hints by document: pins hold what they say, and end with their time or their document."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from chunkcache.errors import DocumentNotFoundError, InvalidValueError, PinLimitError
from chunkcache.planning import AskOptions

Caches = Callable[..., Any]
Passages = dict[str, str]


def entry_size(cache: Any, document_id: str) -> int:
    with_pins = cache.pin([document_id], ttl_s=60)
    cache.unpin([document_id])
    assert with_pins.num_chunks
    return with_pins.num_bytes


def test_a_pinned_document_is_served_from_ram_whatever_else_comes(
    open_cache: Caches, passages: Passages
) -> None:
    probe = open_cache("probe")
    probe.put("tower", passages["tower"])
    room = entry_size(probe, "tower") * 2 + 100
    cache = open_cache(host_tier_bytes=room, host_eviction="lru", max_pinned_ratio=0.6)
    for name, text in passages.items():
        cache.put(name, text)
    pinned = cache.pin(["tower"], ttl_s=600)
    assert (pinned.num_documents, pinned.ttl_s) == (1, 600)
    assert cache.runtime.stack.stats().pinned_bytes == pinned.num_bytes > 0
    for _ in range(2):
        for name in passages:
            cache.answer("Who?", [name], policy="none", max_tokens=1)
    answer = cache.answer("Who keeps the key?", ["tower"], policy="none", max_tokens=1)
    assert answer.report.documents[0].source in ("host", "not_loaded")
    assert cache.unpin(["tower"]) == pinned.num_chunks
    assert cache.unpin(["tower"]) == 0
    assert cache.runtime.stack.stats().pinned_bytes == 0
    cache.runtime.stack.check_integrity()


def test_pins_beyond_their_share_are_refused_as_a_whole(
    open_cache: Caches, passages: Passages
) -> None:
    probe = open_cache("probe")
    for name, text in passages.items():
        probe.put(name, text)
    first, *others = passages
    size = entry_size(probe, first)
    cache = open_cache(host_tier_bytes=3 * size, max_pinned_ratio=0.5)
    for name, text in passages.items():
        cache.put(name, text)
    kept = cache.pin([first], ttl_s=600)
    with pytest.raises(PinLimitError):
        cache.pin([first, *others], ttl_s=600)
    assert cache.runtime.stack.stats().pinned_bytes == kept.num_bytes
    assert cache.runtime.stack.stats().leases_open == 0


def test_deleting_a_document_ends_its_pins(open_cache: Caches, passages: Passages) -> None:
    cache = open_cache()
    cache.put("tower", passages["tower"])
    cache.pin(["tower"], ttl_s=600)
    cache.delete("tower")
    stats = cache.runtime.stack.stats()
    assert (stats.pinned_bytes, stats.entries["host"]) == (0, 0)
    cache.runtime.stack.check_integrity()


def test_a_pin_that_comes_behind_the_removal_keeps_nothing(
    open_cache: Caches, passages: Passages
) -> None:
    cache = open_cache()
    cache.put("tower", passages["tower"])
    identity = cache.plan("", ["tower"], AskOptions()).identities[0]
    stack = cache.runtime.stack
    with cache.runtime.ensure_entry(identity) as lease:
        cache.delete("tower")
        assert not stack.pin(lease.entry, 600)
        assert not stack.expect_use(lease.entry, 5)
    stats = stack.stats()
    assert (stats.pinned_bytes, stats.entries["host"], stats.bytes["host"]) == (0, 0, 0)
    stack.check_integrity()


def test_a_next_use_brings_a_document_to_ram(open_cache: Caches, passages: Passages) -> None:
    cache = open_cache()
    cache.put("tower", passages["tower"])
    held = cache.next_use(["tower"], in_s=30)
    assert held == cache.runtime.stack.stats().entries["host"] >= 1


def test_hints_are_checked(open_cache: Caches, passages: Passages) -> None:
    cache = open_cache()
    cache.put("tower", passages["tower"])
    for ttl_s in (0, -1, math.inf, math.nan):
        with pytest.raises(InvalidValueError):
            cache.pin(["tower"], ttl_s=ttl_s)
    for in_s in (-1, math.inf):
        with pytest.raises(InvalidValueError):
            cache.next_use(["tower"], in_s=in_s)
    for call in (
        lambda: cache.pin(["tower", "none"], ttl_s=1),
        lambda: cache.unpin(["none"]),
        lambda: cache.next_use(["none"], in_s=1),
    ):
        with pytest.raises(DocumentNotFoundError):
            call()
    assert cache.runtime.stack.stats().pinned_bytes == 0
