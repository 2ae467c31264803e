"""How fast the offline job is beside bare prefill, and what it does when little or nothing changed.

One store, four steps: a sample of the corpus's chunks is prefilled and forgotten (bare); the corpus
is pre-cached with some documents in an earlier version; again with nothing changed; and the earlier
versions are replaced by the current ones. The sample is prefilled once more behind the first run, so
that a machine that got slower meanwhile counts for both.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chunkcache.chunk_cache import ChunkCache
from chunkcache.errors import InvalidValueError
from chunkcache.identity import EntryIdentity
from chunkcache.planning import PromptPlanner
from chunkcache.precache import PrecacheProgress
from chunkcache.results import ItemFailure, PrecacheSummary
from chunkcache.text_files import TextFile, TextItem, find_text_files
from chunkcache_retriever.file_readers import file_kinds

OnProgress = Callable[[str], None]

SAMPLE_CHUNKS = 24
_TELL_SECONDS = 10.0


@dataclass(frozen=True)
class RunFigures:
    """One run of the job.

    Attributes:
        documents: Documents.
        chunks: Their chunks.
        tokens: Their tokens.
        prefilled_chunks: Chunks run through the model.
        prefilled_tokens: Their tokens.
        seconds: Wall time.
        tokens_per_second: Prefilled tokens over it.
    """

    documents: int
    chunks: int
    tokens: int
    prefilled_chunks: int
    prefilled_tokens: int
    seconds: float
    tokens_per_second: float

    @classmethod
    def of(cls, summary: PrecacheSummary) -> "RunFigures":
        """The figures of a run."""
        return cls(**{name: getattr(summary, name) for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class PrecacheReport:
    """What was measured.

    Attributes:
        bare_tokens_per_second: Chunk tokens a second of the prefill alone, before and behind.
        first: The first run.
        second: The same with nothing changed.
        edits: Documents whose earlier version was replaced.
        failures: Items that could not be read.
    """

    bare_tokens_per_second: tuple[float, float]
    first: RunFigures
    second: RunFigures
    edits: RunFigures
    failures: tuple[ItemFailure, ...] = ()

    @property
    def bare_ratio(self) -> float:
        """The first run's tokens a second over the bare prefill's."""
        return self.first.tokens_per_second * 2 / sum(self.bare_tokens_per_second)

    @property
    def second_ratio(self) -> float:
        """The second run's time over the first's."""
        return self.second.seconds / self.first.seconds

    @property
    def reuse_ratio(self) -> float:
        """Share of the edited documents' chunks that were there already."""
        return 1 - self.edits.prefilled_chunks / max(self.edits.chunks, 1)

    def to_dict(self) -> dict[str, Any]:
        """One JSON object."""
        before, behind = self.bare_tokens_per_second
        return {
            "bare_tokens_per_second": round((before + behind) / 2, 2),
            "bare_tokens_per_second_before": round(before, 2),
            "bare_tokens_per_second_behind": round(behind, 2),
            "tokens_per_second": round(self.first.tokens_per_second, 2),
            "bare_ratio": round(self.bare_ratio, 4),
            "second_ratio": round(self.second_ratio, 4),
            "second_prefills": self.second.prefilled_chunks,
            "reuse_ratio": round(self.reuse_ratio, 4),
            "first": asdict(self.first),
            "second": asdict(self.second),
            "edits": asdict(self.edits),
            "failures": [asdict(f) for f in self.failures],
        }


def read_corpus(folders: Sequence[Path]) -> tuple[dict[str, TextItem], tuple[ItemFailure, ...]]:
    """Documents below folders by their ids, and what could not be read."""
    documents: dict[str, TextItem] = {}
    failures: list[ItemFailure] = []
    for found in find_text_files(folders, file_kinds()):
        item = found.read() if isinstance(found, TextFile) else found
        if isinstance(item, ItemFailure):
            failures.append(item)
        else:
            documents[item.document_id] = item
    return documents, tuple(failures)


def spread(documents: Mapping[str, TextItem], limit: int | None) -> dict[str, TextItem]:
    """At most so many documents, evenly spaced in the order of their ids."""
    names = sorted(documents)
    if limit is not None and limit < len(names):
        names = [names[i * len(names) // limit] for i in range(limit)]
    return {name: documents[name] for name in names}


def without_middle_line(item: TextItem) -> TextItem:
    """An earlier version of a document, for corpora that have none: its middle line is missing."""
    lines = item.text.splitlines(keepends=True)
    del lines[len(lines) // 2]
    return TextItem(item.document_id, "".join(lines), item.metadata, item.text_format)


def measure_precache(
    cache: ChunkCache,
    current: Mapping[str, TextItem],
    previous: Mapping[str, TextItem],
    *,
    failures: tuple[ItemFailure, ...] = (),
    progress: OnProgress = lambda line: None,
) -> PrecacheReport:
    """Measure the job over an empty store.

    Args:
        cache: An open cache without documents.
        current: The corpus, by ids.
        previous: Earlier versions of some of its documents.
        failures: Items that could not be read, to be reported.
        progress: Told in lines how far it is.

    Raises:
        InvalidValueError: There is no document to cache, or none in an earlier version.
        StoreError: The store failed.
    """
    edited = [item for name, item in current.items() if name in previous]
    if not edited:
        raise InvalidValueError("no document is there in an earlier version", param="previous")
    earlier = [previous.get(name, item) for name, item in current.items()]
    sample = _sample(cache, list(current.values()))
    progress(f"{len(sample)} chunks, prefilled and forgotten")
    before = _bare_rate(cache, sample)
    first = _run(cache, earlier, "first run", progress)
    behind = _bare_rate(cache, sample)
    second = _run(cache, earlier, "second run", progress)
    edits = _run(cache, edited, "edits", progress)
    return PrecacheReport(
        (before, behind),
        RunFigures.of(first),
        RunFigures.of(second),
        RunFigures.of(edits),
        (*failures, *first.failures),
    )


def _run(
    cache: ChunkCache, items: Iterable[TextItem], name: str, progress: OnProgress
) -> PrecacheSummary:
    told_at = time.monotonic()

    def tell(done: PrecacheProgress) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= _TELL_SECONDS:
            told_at = time.monotonic()
            progress(f"{name}: {done.documents} documents, {done.tokens_per_second:,.0f} tokens/s")

    return cache.precache(items, on_progress=tell)


def _sample(cache: ChunkCache, items: Sequence[TextItem]) -> list[EntryIdentity]:
    """Some chunks of the corpus, evenly spaced over its documents."""
    runtime, catalog = cache.runtime, cache.catalog
    planner = PromptPlanner(runtime, catalog)
    chunks: dict[tuple[int, ...], None] = {}
    for item in items[:: max(1, len(items) // SAMPLE_CHUNKS)]:
        cut = runtime.splitter.split(item.text, catalog.namespace, item.text_format)
        chunks.update(dict.fromkeys(c.token_ids for c in cut[len(cut) // 2 :][:1]))
    sampled = list(chunks)[:SAMPLE_CHUNKS]
    return list(planner.names.identities(sampled, planner.system_ids(None)))


def _bare_rate(cache: ChunkCache, identities: Sequence[EntryIdentity]) -> float:
    """Chunk tokens a second, on the engine's thread; the prefix that they share runs before."""
    runtime = cache.runtime

    def compute(identity: EntryIdentity) -> None:
        runtime.engine.call(lambda: runtime.prefill.compute(identity, runtime.codec)).result()

    compute(identities[0])
    started = time.perf_counter()
    for identity in identities:
        compute(identity)
    num_tokens = sum(len(i.token_ids) for i in identities)
    return num_tokens / (time.perf_counter() - started)
