"""Pre-caching folders as they change: which files a change concerns, and what all runs did together.

Changes are told by the operating system, through ``watchfiles``. What happens during a run is kept
until the next, so nothing is missed; and whatever was missed by a kill, the next start finds, since
a run over everything comes first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from chunkcache_api.cli.console import say
from chunkcache_api.cli.corpus import Corpus, Shard, find_corpus, prune
from chunkcache_api.cli.precache_run import run_precache
from chunkcache_api.cli.stopping import StopRequest

if TYPE_CHECKING:
    from chunkcache.chunk_cache import ChunkCache
    from chunkcache.precache import Item
    from chunkcache.results import ItemFailure, PrecacheSummary
    from chunkcache_retriever.row_readers import RowColumns

GATHER_MS = 400
"""A change waits so long for others, at most, to be cached together with them."""
_STEP_MS = 50
_LOOK_MS = 100
_COUNTS = (
    "documents",
    "created",
    "updated",
    "unchanged",
    "chunks",
    "tokens",
    "prefilled_chunks",
    "prefilled_tokens",
    "prefill_rows",
    "without_neighbours",
    "not_kept_chunks",
    "seconds",
)


@dataclass(frozen=True)
class Changes:
    """What changed below some folders.

    Attributes:
        names: Per folder's root digest, names of files and folders below it; a folder stands for
            everything in it.
        is_known: Whether they are all; if not, everything has to be looked at.
    """

    names: frozenset[tuple[str, str]] = frozenset()
    is_known: bool = True

    def touched(self, corpus: Corpus) -> Corpus:
        """The corpus with the changed items alone; what it knows of all documents stays."""
        if not self.is_known:
            return corpus
        return replace(corpus, items=tuple(s for s in corpus.items if self._concerns(s.item)))

    def _concerns(self, item: "Item") -> bool:
        from chunkcache.precache import StoredDocument
        from chunkcache.results import ItemFailure
        from chunkcache.text_files import SOURCE_KEY

        if isinstance(item, StoredDocument):
            return False
        if isinstance(item, ItemFailure):
            names = {name for _, name in self.names}
            found = (item.item, item.item.rpartition("#")[0])
            return any(part in names for name in found for part in _with_parents(name))
        source = item.metadata.get(SOURCE_KEY)
        if not isinstance(source, dict):
            return False
        root, path = str(source.get("root")), str(source.get("path"))
        return any((root, part) in self.names for part in _with_parents(path))


class CorpusWatch:
    """Caches folders, and then whatever changes in them.

    Args:
        cache: Where to.
        folders: The folders.
        shard: Which part of them; None is all.
        columns: Which columns of rows hold what.
        stop: Asks for the end behind the documents at hand.
        prunes: Whether documents are deleted whose file or row goes.
    """

    def __init__(
        self,
        cache: "ChunkCache",
        folders: Sequence[Path],
        shard: Shard | None,
        columns: "RowColumns",
        stop: StopRequest,
        *,
        prunes: bool,
    ) -> None:
        self._cache = cache
        self._folders = folders
        self._shard = shard
        self._columns = columns
        self._stop = stop
        self._prunes = prunes
        self._pruned: list[str] = []

    def run(self) -> "tuple[PrecacheSummary, list[str]]":
        """Cache until somebody asks to stop.

        Returns:
            What all runs did together, and ids of the documents that were deleted.

        Raises:
            InvalidValueError: Something is not a folder.
            MissingExtraError: ``watchfiles`` is not installed.
            StoreError: The store failed; what was finished is kept.
        """
        total: PrecacheSummary | None = None
        store = self._cache.runtime.settings.store
        for changes in watch_folders(self._folders, self._stop, store):
            corpus = find_corpus(self._folders, self._shard, self._columns)
            if total is None:
                say(
                    f"watching {len(self._folders)} folder(s); {len(corpus.items):,} files to begin"
                )
            else:
                corpus = changes.touched(corpus)
            latest = run_precache(self._cache, corpus.items, self._stop)
            pruned: list[str] = []
            if self._prunes and not latest.interrupted:
                pruned = prune(self._cache, corpus)
                self._pruned += pruned
            if total is not None and (corpus.items or pruned):
                say(
                    f"{latest.documents} changed, {latest.prefilled_chunks} chunks prefilled, "
                    f"{len(latest.failures)} failed, {len(pruned)} deleted"
                )
            total = latest if total is None else joined(total, latest)
            kept = without_recovered(total.failures, corpus, latest)
            total = replace(total, failures=kept)
            if self._stop.is_set():
                break
        if total is None:  # asked to stop before the first look
            total = run_precache(self._cache, (), self._stop)
        return total, self._pruned


def watch_folders(folders: Sequence[Path], stop: StopRequest, store: Path) -> Iterator[Changes]:
    """What changes below folders, until somebody asks to stop.

    Args:
        folders: The folders.
        stop: Looked at ten times a second.
        store: The store; it may lie in a folder, and what changes in it is nothing to cache.

    Yields:
        First no change, once nothing can be missed any more; then whenever something changed.

    Raises:
        InvalidValueError: Something is not a folder.
        MissingExtraError: ``watchfiles`` is not installed.
    """
    from chunkcache.errors import InvalidValueError, MissingExtraError

    try:
        from watchfiles import watch
    except ImportError as error:
        raise MissingExtraError("--watch needs: pip install 'chunkcache[watch]'") from error
    for folder in folders:
        if not folder.is_dir():
            raise InvalidValueError(f"--watch takes folders, and {folder} is none", param="watch")
    roots = [folder.resolve() for folder in folders]
    looks = watch(
        *roots,
        watch_filter=None,
        debounce=GATHER_MS,
        step=_STEP_MS,
        stop_event=stop,  # type: ignore[arg-type]
        rust_timeout=_LOOK_MS,
        yield_on_timeout=True,
        raise_interrupt=False,
    )
    is_first, store = True, store.resolve()
    for looked in looks:
        found = [p for _, path in looked if not (p := Path(path)).is_relative_to(store)]
        if found or is_first:
            yield _changes(roots, found)
        is_first = False


def joined(first: "PrecacheSummary", second: "PrecacheSummary") -> "PrecacheSummary":
    """What two runs did, one behind the other.

    An item that failed in the first and is not among the failures of the second stays reported; see
    :func:`without_recovered`.
    """
    assert set(_COUNTS) < {f.name for f in fields(first)}
    sums = {name: getattr(first, name) + getattr(second, name) for name in _COUNTS}
    again = {failure.item for failure in second.failures}
    kept = tuple(failure for failure in first.failures if failure.item not in again)
    return replace(
        second,
        **sums,
        prefill_rows_per_token=sums["prefill_rows"] / max(sums["prefilled_tokens"], 1),
        tokens_per_second=sums["prefilled_tokens"] / max(sums["seconds"], 1e-9),
        failures=(*kept, *second.failures),
    )


def without_recovered(
    failures: "tuple[ItemFailure, ...]", run: Corpus, latest: "PrecacheSummary"
) -> "tuple[ItemFailure, ...]":
    """Failures without those of items that were taken again and did not fail, or that are gone.

    Args:
        failures: Of all runs.
        run: What the latest run took, and what it knows of all documents.
        latest: What that run did.
    """
    failed = {failure.item for failure in latest.failures}
    there = run.document_ids | set(run.failed)
    taken = {_name_of(s.item) for s in run.items}
    return tuple(
        f for f in failures if f.item in failed or (f.item in there and f.item not in taken)
    )


def _name_of(item: "Item") -> str:
    from chunkcache.results import ItemFailure

    return item.item if isinstance(item, ItemFailure) else item.document_id


def _changes(roots: Sequence[Path], paths: Sequence[Path]) -> Changes:
    from chunkcache.text_files import source_root

    names: set[tuple[str, str]] = set()
    for path in paths:
        # What the file's name is cannot be told where it is not Unicode.
        if "\ufffd" in str(path):
            return Changes(is_known=False)
        names |= {
            (source_root(root), path.relative_to(root).as_posix())
            for root in roots
            if path.is_relative_to(root)
        }
    if any(name == "." for _, name in names):
        return Changes(is_known=False)
    return Changes(frozenset(names))


def _with_parents(name: str) -> Iterator[str]:
    yield name
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name
