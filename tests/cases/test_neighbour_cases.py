"""Case tests F16 and J01 where chunks are prepared behind others: deleted, and killed half-way."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chunkcache.identity import ChunkKey
from chunkcache.planning import AskOptions
from chunkcache.precache import TextItem
from chunkcache.store.entry_format import decode_header
from chunkcache.store.transaction import Database
from chunkcache_retriever.neighbours import OverlapNeighbours

Caches = Callable[..., Any]
SECRET = "The vault opens with the word heliotrope."
PUBLIC = {
    "visit": "The vault opens to visitors on Sundays.",
    "words": "The word of the day opens the crossword.",
}


@pytest.fixture
def open_prepared(open_cache: Caches, model_dir: Any) -> Caches:
    """Opens caches whose chunks have one neighbour each."""

    def make(store: str = "store") -> Any:
        model = model_dir(max_position_embeddings=2048)
        return open_cache(store, model, preparation="neighbours(1)", chunk_tokens=48)

    return make


def _headers(cache: Any) -> Iterator[Any]:
    with cache.runtime.env.read() as txn:
        yield from (decode_header(value) for _, value in txn.scan(Database.ENTRIES))


def _holds(tokens: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return any(tokens[i : i + len(part)] == part for i in range(len(tokens)))


def test_F16_what_others_had_read_of_a_deleted_document_goes_with_it(
    open_prepared: Caches,
) -> None:
    """No tier serves it, nothing prepared behind it is left, and the reply says what went."""
    cache = open_prepared()
    items = [TextItem(name, text) for name, text in (PUBLIC | {"secret": SECRET}).items()]
    finder = OverlapNeighbours(cache.catalog)
    cache.precache(items, neighbours=finder)
    names = [*PUBLIC, "secret"]
    cache.answer("Which word?", names, policy="none", max_tokens=2)
    plan = cache.plan("Which word?", names, AskOptions())
    (secret,) = cache.get("secret").chunks
    keys = [i.key() for i in plan.identities]
    behind = [i.key() for i in plan.identities if secret.chunk_id in i.behind]
    assert behind, "the secret is somebody's nearest"
    traced = {keys[names.index("secret")], *behind}

    removed = cache.delete("secret")
    assert removed.removed_entries == len(traced)
    assert removed.unprepared_chunks == len(behind)
    for key in keys:
        is_somewhere = cache.runtime.stack.contains(key) or cache.runtime.stack._host.contains(key)
        assert is_somewhere == (key not in traced)

    cache.put("secret", "Nothing to see here.")
    cache.precache(neighbours=finder)
    answer = cache.answer("Which word?", names, policy="none", max_tokens=2)
    assert not answer.report.warnings
    for header in _headers(cache):
        identity = header.identity()
        assert not _holds(identity.prefix_ids + identity.token_ids, secret.token_ids)
    with cache.runtime.env.read() as txn:
        # The log of removals names by digest what other processes have to drop.
        kept = set(Database) - {Database.REMOVALS}
        live = [bytes(v) for d in kept for _, v in txn.scan(d)]
    assert not any(b"heliotrope" in value for value in live)
    assert not any(secret.chunk_id in value for value in live)


def _texts() -> dict[str, str]:
    return {
        f"doc-{i:03}": f"House {i} has {i * 31} windows. Its porter keeps {i * 7} keys. "
        f"The code of its door is {i * 7919 % 10_000}, and the bell rings {i % 5} times."
        for i in range(16)
    }


PRECACHE = """
from chunkcache_retriever.neighbours import OverlapNeighbours

def body(report):
    settings = {"cache_dir": cache_dir, "chunk_tokens": 48, "preparation": "neighbours(1)",
                "store_max_bytes": 1 << 30}
    seen = 0
    def on_progress(progress):
        nonlocal seen
        while seen < progress.documents + progress.prefilled_chunks:
            seen += 1
            report()
    with ChunkCache.open(store, model, **settings) as cache:
        items = [TextItem(n, t) for n, t in texts.items()]
        cache.precache(items, neighbours=OverlapNeighbours(cache.catalog), on_progress=on_progress)

for num_reports in kills:
    killed_after(num_reports, body)
"""


def _entries(cache: Any) -> dict[tuple[tuple[int, ...], tuple[int, ...]], bytes]:
    """Every entry's numbers, by what stood in front of it and what it holds."""
    found = {}
    with cache.runtime.env.read() as txn:
        for _, value in txn.scan(Database.ENTRIES):
            header = decode_header(value)
            identity = header.identity()
            payload = bytes(value[len(value) - header.payload_bytes :])
            found[identity.prefix_ids, identity.token_ids] = payload
    return found


def test_J01_a_killed_run_goes_on_with_the_neighbours_it_had(
    open_prepared: Caches, run_child: Any, model_dir: Any, cache_dir: Path, tmp_path: Path
) -> None:
    """Killed while storing, then while preparing: the end equals that of a run never killed."""
    run_child(
        PRECACHE,
        store=tmp_path / "store",
        model=model_dir(max_position_embeddings=2048),
        cache_dir=cache_dir,
        texts=_texts(),
        kills=[7, 16 + 10],
    )
    items = [TextItem(name, text) for name, text in _texts().items()]
    cache = open_prepared()
    kept = _entries(cache)
    assert len(kept) >= 8
    summary = cache.precache(items, neighbours=OverlapNeighbours(cache.catalog))
    assert (summary.unchanged, summary.without_neighbours) == (16, 0)
    resumed = _entries(cache)
    assert summary.prefilled_chunks == len(resumed) - len(kept)
    assert kept.items() <= resumed.items()
    again = cache.precache(items, neighbours=OverlapNeighbours(cache.catalog))
    assert again.prefilled_chunks == 0

    whole = open_prepared("whole")
    whole.precache(items, neighbours=OverlapNeighbours(whole.catalog))
    assert resumed == _entries(whole)
    assert all(whole.runtime.stack.contains(ChunkKey(i.key())) for i in _identities(whole))


def _identities(cache: Any) -> Any:
    return cache.plan("Who?", sorted(_texts()), AskOptions()).identities
