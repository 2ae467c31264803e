"""Case tests, area M: an entry's memory belongs to the entry, and every bit of it returns."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkcache.codecs import CODECS
from chunkcache.entry import Entry
from chunkcache.identity import EntryIdentity, ModelDigest, TenantNamespace
from chunkcache.planning import AskOptions
from chunkcache.store.disk import DiskTier
from chunkcache.store.entry_format import decode_entry, encode_entry, view_entry

Caches = Callable[..., Any]
Passages = dict[str, str]


def _identity(token_ids: tuple[int, ...], codec: str = "bf16", preparation: str = "alone") -> Any:
    return EntryIdentity(
        ModelDigest(b"m" * 32), TenantNamespace(b"n" * 32), preparation, (), codec, token_ids
    )


def _entry(identity: EntryIdentity, k: torch.Tensor) -> Entry:
    return Entry(identity, identity.key(), k, k.flip(0))


def test_M01_answers_never_grow_an_entry(
    open_cache: Caches, passages: Passages, entry_bytes: Any
) -> None:
    """However often and however long a chunk is answered over, it stays as large as it was."""
    cache = open_cache()
    cache.put("tower", passages["tower"])
    stack = cache.runtime.stack
    stored, held = entry_bytes(cache), stack.stats().bytes
    identities = cache.plan("", ["tower"], AskOptions()).identities
    answers = []
    for num_tokens in (20, 60, 20):
        answers.append(cache.answer("Who keeps it?", ["tower"], max_tokens=num_tokens))
        assert stack.stats().bytes == held
        for identity in identities:
            with stack.load(identity) as lease:
                assert lease.entry.num_tokens == len(identity.token_ids)
    assert entry_bytes(cache) == stored
    assert answers[0].token_ids == answers[2].token_ids == answers[1].token_ids[:20]


def test_M02_entries_hold_no_graph_and_no_spare_memory(
    open_cache: Caches, passages: Passages
) -> None:
    """Entries made while gradients are on hold none, and no byte beyond their payload."""
    with torch.enable_grad():
        cache = open_cache()
        cache.precache([])
        for name, text in passages.items():
            cache.put(name, text)
    identities = cache.plan("", list(passages), AskOptions()).identities
    num_bytes = 0
    for identity in identities:
        with cache.runtime.stack.load(identity) as lease:
            for tensor in (lease.entry.k, lease.entry.v):
                assert not tensor.requires_grad
                assert tensor.grad_fn is None
                assert tensor.untyped_storage().nbytes() == tensor.nbytes
                num_bytes += tensor.nbytes
    assert cache.runtime.stack.stats().bytes["host"] == num_bytes


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_M04_windows_are_reused_or_the_answer_says_why(
    open_cache: Caches, model_dir: Any, passages: Passages, family: str
) -> None:
    """A model with sliding windows reuses chunks for real: fewer rows run, none recomputed unsaid.

    Where a prompt runs in full all the same, the report names the reason and counts no hit.
    """
    extra = {} if family == "mistral" else {"use_sliding_window": True, "max_window_layers": 1}
    cache = open_cache(model=model_dir(family, sliding_window=24, **extra))
    for name, text in passages.items():
        cache.put(name, text)
    for _ in range(2):
        answer = cache.answer("Who keeps the key?", list(passages), policy="lego")
        account = answer.report.account
        assert account.cached_tokens > account.prompt_tokens // 3
        assert answer.report.charged_ratio < 1
        assert not answer.report.warnings
    cache.close()
    limited = open_cache(model=model_dir(family, sliding_window=24, **extra), max_fused_ratio=0.1)
    refused = limited.answer("Who?", list(passages), policy="hybrid", recompute_ratio=0.3)
    assert [w.code for w in refused.report.warnings] == ["ratio_too_high"]
    assert refused.report.account.cached_tokens == 0


def test_M05_threads_on_one_engine_do_not_mix(open_cache: Caches, passages: Passages) -> None:
    """Threads that ask for different documents at once each get what they get alone."""
    cache = open_cache()
    names = list(passages)
    for name in names:
        cache.put(name, passages[name])
    expected = {n: cache.answer("What is it?", [n], max_tokens=25).token_ids for n in names}
    wrong: list[str] = []

    def work(name: str) -> None:
        for _ in range(8):
            answer = cache.answer("What is it?", [name], max_tokens=25)
            if answer.token_ids != expected[name]:
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(n,)) for n in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(set(expected.values())) == len(names)


@pytest.mark.parametrize("codec", ["bf16", "raw16"])
def test_M06_every_bit_pattern_returns(open_cache: Caches, codec: str) -> None:
    """All 65,536 patterns of a 16-bit type come back, also from strided memory.

    Those that stand for no finite number are refused by the store, so they go through the format
    alone; the others through the disk.
    """
    dtype = CODECS[codec].dtype
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    strided = patterns.reshape(2, 64, 4, 128).transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    identity = _identity(tuple(range(64)), codec)
    entry = _entry(identity, strided)
    back = decode_entry(encode_entry(entry), identity)
    for given_, got in ((entry.k, back.k), (entry.v, back.v)):
        assert got.dtype == dtype
        assert got.shape == given_.shape
        assert torch.equal(got.view(torch.uint16), given_.contiguous().view(torch.uint16))

    finite = torch.where(patterns.isfinite(), patterns, torch.zeros((), dtype=dtype))
    identity = _identity(tuple(range(64, 128)), codec)
    entry = _entry(identity, finite.reshape(2, 4, 64, 128).transpose(1, 2))
    disk = DiskTier(open_cache().runtime.env)
    assert disk.put(entry)
    stored = disk.get(identity)
    assert isinstance(stored, Entry)
    assert torch.equal(stored.k.view(torch.uint16), entry.k.contiguous().view(torch.uint16))


@settings(max_examples=20, deadline=None)
@given(
    offset=st.integers(0, 67),
    preparation=st.text("abcdefghijklmnop", max_size=40),
    num_tokens=st.integers(1, 9),
    read_only=st.booleans(),
)
def test_M07_any_alignment_and_no_alias(
    offset: int, preparation: str, num_tokens: int, read_only: bool
) -> None:
    """Values are right wherever the bytes lie and however long the header is; writes stay apart."""
    identity = _identity(tuple(range(num_tokens)), "raw32", preparation)
    k = torch.arange(2 * num_tokens * 8, dtype=torch.float32).reshape(2, num_tokens, 2, 4)
    entry = _entry(identity, k)
    memory = np.zeros(offset + len(encode_entry(entry)), dtype=np.uint8)
    memory[offset:] = np.frombuffer(encode_entry(entry), dtype=np.uint8)
    memory.flags.writeable = not read_only
    before = memory.tobytes()
    first = decode_entry(memory.data[offset:], identity)
    first.k.mul_(2)
    first.v.add_(1)
    viewed = view_entry(memory.data[offset:], identity)
    assert torch.equal(viewed.k, k)
    assert memory.tobytes() == before
    again = decode_entry(memory.data[offset:], identity)
    assert torch.equal(again.k, k)
    assert torch.equal(first.k, 2 * k)


def test_M07_what_a_lookup_gave_is_the_callers_own(open_cache: Caches, passages: Passages) -> None:
    """Writing into what the disk gave changes neither the store nor the next answer."""
    cache = open_cache(host_tier_bytes=0)
    cache.put("tower", passages["tower"])
    before = cache.answer("Who?", ["tower"], policy="none")
    disk = DiskTier(cache.runtime.env)
    for identity in cache.plan("", ["tower"], AskOptions()).identities:
        entry = disk.get(identity)
        assert isinstance(entry, Entry)
        entry.k.mul_(2)
        entry.v.zero_()
    assert disk.check_integrity() == []
    assert cache.answer("Who?", ["tower"], policy="none").token_ids == before.token_ids
