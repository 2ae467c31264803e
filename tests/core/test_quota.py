"""A tenant's quota: what counts, what may be done when it is used up."""

from collections.abc import Callable
from typing import Any

import pytest

from chunkcache.chunk_cache import ChunkCache
from chunkcache.errors import QuotaExceededError
from chunkcache.quota import DocumentSize, TenantQuota

Caches = Callable[..., ChunkCache]


def test_sizes_follow_the_documents(open_cache: Caches, passages: dict[str, str]) -> None:
    cache = open_cache()
    empty = cache.catalog.size()
    assert empty == DocumentSize()
    cache.put("tower", passages["tower"])
    one = cache.catalog.size()
    assert one.num_tokens == cache.get("tower").num_tokens
    assert one.record_bytes > len(passages["tower"])
    cache.put("tower", passages["tower"])
    assert cache.catalog.size() == one
    cache.put("copy", passages["tower"], {"pages": 4})
    both = cache.catalog.size()
    assert both.num_tokens == 2 * one.num_tokens, "what is shared must not show"
    cache.put("tower", passages["tower"] + " It is closed.")
    cache.delete("copy")
    cache.put("tower", passages["tower"])
    assert cache.catalog.size().num_tokens == one.num_tokens
    cache.delete("tower")
    assert cache.catalog.size() == empty


def test_a_write_over_the_quota_changes_nothing(
    open_cache: Caches, passages: dict[str, str]
) -> None:
    cache = open_cache(tenant_max_bytes=1 << 30)
    cache.put("tower", passages["tower"])
    quota: Any = cache.runtime.quota
    needed = quota.bytes_of(cache.catalog.size())
    cache.close()
    cache = open_cache(tenant_max_bytes=needed)
    spec = cache.runtime.model.runner.spec
    assert quota.bytes_per_token == cache.runtime.codec.bytes_per_token(
        spec.num_layers, spec.num_kv_heads, spec.head_dim
    )
    long_text = " ".join(f"Line {n} of a long text." for n in range(200))
    before = cache.catalog.size()
    with pytest.raises(QuotaExceededError) as caught:
        cache.put("long", long_text)
    assert (caught.value.code, caught.value.status) == ("quota_exceeded", 507)
    assert str(needed) in caught.value.message
    assert cache.catalog.size() == before
    assert [info.document_id for info in cache.list()] == ["tower"]
    other = ChunkCache(cache.runtime, "other")
    other.put("tower", passages["tower"])


def test_what_takes_no_more_than_before_is_always_taken() -> None:
    quota = TenantQuota(max_bytes=100, bytes_per_token=10)
    large, smaller = DocumentSize(30, 50), DocumentSize(20, 50)
    quota.check(large, smaller)
    quota.check(large, large)
    quota.check(DocumentSize(), DocumentSize(9, 10))
    with pytest.raises(QuotaExceededError):
        quota.check(smaller, large)
