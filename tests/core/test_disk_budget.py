"""A corpus that is larger than the budget on disk: it ends well, says so, and stays as it is."""

from collections.abc import Callable

from chunkcache.chunk_cache import ChunkCache
from chunkcache.precache import MIN_DOCUMENTS_IN_FLIGHT, TextItem

Caches = Callable[..., ChunkCache]
NUM_DOCUMENTS = 12


def corpus() -> list[TextItem]:
    return [
        TextItem(f"d{n:02}", " ".join(f"Line {i} of text {n}." for i in range(20)))
        for n in range(NUM_DOCUMENTS)
    ]


def stored_keys(cache: ChunkCache) -> set[bytes]:
    return {k for k in cache.catalog.entry_keys() if cache.runtime.stack.contains(k)}


def test_a_corpus_over_the_budget(open_cache: Caches) -> None:
    cache = open_cache()
    cache.precache(corpus())
    whole_bytes = cache.runtime.stack.stats().bytes["disk"]
    cache.runtime.stack.drop(cache.catalog.entry_keys())
    cache.close()

    budget = whole_bytes // 2
    cache = open_cache(disk_budget_bytes=budget)
    first = cache.precache(corpus())
    assert first.documents == NUM_DOCUMENTS
    assert not first.failures
    assert 0 < first.not_kept_chunks < first.chunks
    in_vain = first.prefilled_chunks - (first.chunks - first.not_kept_chunks)
    assert 0 <= in_vain < MIN_DOCUMENTS_IN_FLIGHT, "but for two that want the last place at once"
    stats = cache.runtime.stack.stats()
    assert stats.bytes["disk"] <= budget
    assert stats.disk_evictions == 0
    kept = stored_keys(cache)

    again = cache.precache(corpus())
    # A worker may be at a chunk without an entry before another has met all that have one.
    assert again.prefilled_chunks < MIN_DOCUMENTS_IN_FLIGHT
    assert again.not_kept_chunks > 0
    assert len(kept & stored_keys(cache)) > 0.9 * len(kept)

    # What was not kept answers all the same, and so does what was.
    ids = [d.document_id for d in cache.list(limit=100)]
    assert len(ids) == NUM_DOCUMENTS
    for name in (ids[0], ids[-1]):
        assert cache.answer("Which line?", [name], max_tokens=2).text is not None
    assert cache.runtime.stack.stats().bytes["disk"] <= budget


def test_a_put_over_the_budget_says_how_much_was_not_kept(open_cache: Caches) -> None:
    cache = open_cache(disk_budget_bytes=0)
    item = corpus()[0]
    result = cache.put(item.document_id, item.text)
    assert result.not_kept_chunks == result.num_chunks
    assert (result.prefilled_chunks, result.reused_chunks) == (0, 0)
    assert cache.get(item.document_id).text == item.text
