"""The files of a pre-caching run: found, shared out, and told from those that are gone."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from blake3 import blake3

from chunkcache_api.cli.precache_meter import SizedItem

if TYPE_CHECKING:
    from chunkcache.chunk_cache import ChunkCache
    from chunkcache.precache import Item
    from chunkcache_retriever.row_readers import RowColumns

_PAGE_DOCUMENTS = 1_000


@dataclass(frozen=True)
class Shard:
    """One part of a corpus, by a digest of each document's id: the same on every machine.

    Attributes:
        number: Which, from 1.
        num_shards: Of how many.
    """

    number: int = 1
    num_shards: int = 1

    @classmethod
    def parse(cls, text: str | None) -> "Shard":
        """Read ``i/n``; None is the whole corpus.

        Raises:
            typer.BadParameter: It is something else.
        """
        if text is None:
            return cls()
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise typer.BadParameter(f"--shard is {text!r}, not i/n with 1 <= i <= n, as in 1/4")
        return cls(int(found[1]), int(found[2]))

    def holds(self, name: str) -> bool:
        """Whether an item is of this part."""
        digest = blake3(name.encode("utf-8", "surrogatepass")).digest(8)
        return int.from_bytes(digest, "little") % self.num_shards == self.number - 1


@dataclass(frozen=True)
class Corpus:
    """What there is to cache.

    Attributes:
        items: This shard's items, with their sizes.
        shard: Which part of the corpus they are.
        document_ids: Every document found, of all shards.
        failed: Names of what could not be taken, of all shards.
        roots: The sources' roots under which something was found. Where nothing was, a folder that
            is not mounted cannot be told from one that was emptied.
    """

    items: tuple[SizedItem, ...]
    shard: Shard
    document_ids: frozenset[str]
    failed: tuple[str, ...]
    roots: frozenset[str]


def find_corpus(
    paths: Sequence[Path], shard: Shard | None = None, columns: "RowColumns | None" = None
) -> Corpus:
    """What there is to cache under some paths, and how large it is.

    Args:
        paths: Files and folders.
        shard: Which part of it; None is all.
        columns: Which columns of rows hold what.
    """
    from chunkcache.results import ItemFailure
    from chunkcache.text_files import SOURCE_KEY, find_text_files
    from chunkcache_retriever.file_readers import file_kinds

    shard = shard or Shard()
    items: list[SizedItem] = []
    document_ids: set[str] = set()
    failed: list[str] = []
    roots: set[str] = set()
    for item in find_text_files(paths, file_kinds(columns)):
        if isinstance(item, ItemFailure):
            failed.append(item.item)
            name = item.item
        else:
            document_ids.add(item.document_id)
            roots.add(_root(item.metadata.get(SOURCE_KEY)))
            name = item.document_id
        if shard.holds(name):
            items.append(SizedItem(item, _num_bytes(item)))
    return Corpus(tuple(items), shard, frozenset(document_ids), tuple(failed), frozenset(roots))


def prune(cache: "ChunkCache", corpus: Corpus) -> list[str]:
    """Delete the documents that came from the corpus's roots and whose file or row is gone.

    What could not be read is not gone, nor is what stood under a root where nothing is found now.
    Documents of other roots, and those that came from no file, stay.

    Returns:
        Ids of what was deleted.
    """
    gone = list(_gone(cache, corpus))
    for document_id in gone:
        cache.delete(document_id)
    return gone


def _gone(cache: "ChunkCache", corpus: Corpus) -> Iterator[str]:
    from chunkcache.text_files import SOURCE_KEY

    failed = set(corpus.failed)
    # A row, or a folder, that could not be read hides what documents it holds.
    hidden = {name.rpartition("#")[0] for name in failed} | failed
    after: str | None = None
    while page := cache.list(after=after, limit=_PAGE_DOCUMENTS):
        after = page[-1].document_id
        for info in page:
            source = info.metadata.get(SOURCE_KEY)
            if not isinstance(source, dict) or _root(source) not in corpus.roots:
                continue
            path = str(source.get("path"))
            parents = {path[: m.start()] for m in re.finditer("/", path)}
            is_there = info.document_id in corpus.document_ids or hidden & {path, *parents}
            if not is_there and corpus.shard.holds(info.document_id):
                yield info.document_id


def _root(source: object) -> str:
    """The root that a document's metadata name; empty if they name none."""
    root = source.get("root") if isinstance(source, dict) else None
    return root if isinstance(root, str) else ""


def _num_bytes(item: "Item") -> int:
    from chunkcache.text_files import TextFile, TextItem

    if isinstance(item, TextItem):
        return len(item.text.encode("utf-8", "replace"))
    try:
        return item.path.stat().st_size if isinstance(item, TextFile) else 0
    except OSError:
        return 0  # reading it reports why
