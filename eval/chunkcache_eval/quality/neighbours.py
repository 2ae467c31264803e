"""Neighbours for a quality run: from the whole data file, never from a question's own prompt.

At prompt time nobody would know which chunks stand together, so a chunk must not be prepared behind
one that shares a prompt with it. A chunk has one list of neighbours, whichever question it is asked
in: what any of its questions names is left out.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Literal, get_args

from chunkcache.catalog import Catalog
from chunkcache.errors import InvalidValueError
from chunkcache.identity import ChunkId
from chunkcache.neighbours import NeighbourFinder
from chunkcache_eval.datasets.records import Question
from chunkcache_eval.quality.measure import document_id_of
from chunkcache_retriever.neighbours import (
    EmbeddingNeighbours,
    OverlapNeighbours,
    RandomNeighbours,
)
from chunkcache_retriever.shared_neighbours import SharedNeighbours

_EMBEDDED_PER_LINE = 256

NeighbourSource = Literal["embedding", "shared", "overlap", "random"]


def neighbour_source(text: str) -> NeighbourSource:
    """Read the name of a way to find neighbours.

    Raises:
        InvalidValueError: There is no such way.
    """
    for source in get_args(NeighbourSource):
        if text == source:
            return source
    raise InvalidValueError(
        f"neighbours {text!r} cannot be found; known: {', '.join(get_args(NeighbourSource))}",
        param="neighbours",
    )


def find_neighbours_by(
    source: NeighbourSource, catalog: Catalog, progress: Callable[[str], None]
) -> NeighbourFinder:
    """A finder by its name; the embedder is loaded only where it is needed.

    Args:
        source: The name.
        catalog: Whose chunks are ranked.
        progress: Told in lines how far the embedding of new chunks is.

    Raises:
        ModelFilesError: The embedder is not installed.
    """
    if source == "overlap":
        return OverlapNeighbours(catalog)
    if source == "random":
        return RandomNeighbours(catalog)
    from chunkcache_retriever.minilm import MiniLmEmbedder

    def tell(num_done: int, num_chunks: int) -> None:
        if num_done == num_chunks or not num_done % _EMBEDDED_PER_LINE:
            progress(f"embedded {num_done:,} of {num_chunks:,} passages, to find neighbours")

    if source == "shared":
        return SharedNeighbours(catalog, MiniLmEmbedder(), on_embedded=tell)
    return EmbeddingNeighbours(catalog, MiniLmEmbedder(), tell)


class NeighboursOutsidePrompts:
    """Ranks the chunks of one data file that share no prompt with a chunk.

    Args:
        finder: Ranks all of the catalog's chunks.
        catalog: Holds the passages of every question.
        questions: All questions of the file.
    """

    def __init__(
        self, finder: NeighbourFinder, catalog: Catalog, questions: Sequence[Question]
    ) -> None:
        self._finder = finder
        self._catalog = catalog
        self._questions = questions

    def nearest(self, chunk_id: ChunkId) -> Iterator[ChunkId]:
        """Chunks of the file outside the chunk's own prompts, the nearest first."""
        left_out = self._companions.get(chunk_id, set())
        for other in self._finder.nearest(chunk_id):
            if other in self._companions and other not in left_out:
                yield other

    @cached_property
    def _companions(self) -> dict[ChunkId, set[ChunkId]]:
        """Of each chunk of the file, those that stand in a prompt with it, itself included."""
        names = {document_id_of(p) for q in self._questions for p in q.passages}
        documents = self._catalog.get_many(names)
        companions: dict[ChunkId, set[ChunkId]] = {}
        for question in self._questions:
            found = [documents.get(document_id_of(p)) for p in question.passages]
            together = {c.chunk_id for d in found if d is not None for c in d.chunks}
            for chunk_id in together:
                companions.setdefault(chunk_id, set()).update(together)
        return companions
