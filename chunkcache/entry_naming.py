"""Which entry a chunk wants: by the preparation, the prompt's opening and its recorded neighbours.

Runs no model, and looks at no entry.
"""

from collections.abc import Sequence

from chunkcache.catalog import Catalog
from chunkcache.catalog_values import Neighbour
from chunkcache.fusion.layout import prompt_prefix_ids
from chunkcache.fusion.preparation import Preparation
from chunkcache.identity import ChunkId, EntryIdentity, chunk_id
from chunkcache.runtime import Runtime


class EntryNames:
    """Names the entries of one tenant's chunks.

    Args:
        runtime: Model, codec and preparation.
        catalog: The tenant's documents.
    """

    def __init__(self, runtime: Runtime, catalog: Catalog) -> None:
        self._runtime = runtime
        self._catalog = catalog

    def identities(
        self, chunks: Sequence[tuple[int, ...]], system_ids: tuple[int, ...]
    ) -> tuple[EntryIdentity, ...]:
        """The entries that chunks want in a prompt with a system text.

        Under ``neighbours(n)``, a chunk of which no neighbours are recorded, or whose neighbours do
        not fit the model behind this system text, wants an entry prefilled without neighbours; its
        identity names that preparation.

        Args:
            chunks: Token ids of each.
            system_ids: The system text's.
        """
        preparation = self._runtime.preparation
        fallback = preparation.without_neighbours
        opening_ids = prompt_prefix_ids(self._runtime.model.template, system_ids)
        shared = self._prefix_ids(fallback, opening_ids, ())
        recorded: Sequence[tuple[Neighbour, ...]] = [()] * len(chunks)
        if preparation.kind == "neighbours":
            recorded = self._recorded(chunks)
        identities: list[EntryIdentity] = []
        for token_ids, neighbours in zip(chunks, recorded, strict=True):
            identity = self._identity(fallback, shared, token_ids, ())
            if neighbours:
                prefix_ids = self._prefix_ids(preparation, opening_ids, neighbours)
                if len(prefix_ids) + len(token_ids) <= self._max_positions:
                    identity = self._identity(preparation, prefix_ids, token_ids, neighbours)
            identities.append(identity)
        return tuple(identities)

    def room_for_neighbours(self, token_ids: tuple[int, ...], system_ids: tuple[int, ...]) -> int:
        """Tokens of neighbours, their joints included, that fit between the opening and a chunk."""
        opening_ids = prompt_prefix_ids(self._runtime.model.template, system_ids)
        return self._max_positions - len(opening_ids) - len(token_ids)

    @property
    def _max_positions(self) -> int:
        return self._runtime.model.runner.spec.max_positions

    def _recorded(self, chunks: Sequence[tuple[int, ...]]) -> list[tuple[Neighbour, ...]]:
        """Of each chunk, what is recorded; in one transaction."""
        namespace, tokenizer = self._catalog.namespace, self._runtime.model.tokenizer.digest
        ids: list[ChunkId] = [chunk_id(namespace, tokenizer, c) for c in chunks]
        found = self._catalog.get_neighbours(str(self._runtime.preparation), set(ids))
        return [found.get(i, ()) for i in ids]

    def _prefix_ids(
        self,
        preparation: Preparation,
        opening_ids: tuple[int, ...],
        neighbours: Sequence[Neighbour],
    ) -> tuple[int, ...]:
        model = self._runtime.model
        return preparation.prefix_ids(
            model.template,
            model.tokenizer,
            model.bos_token_id,
            opening_ids,
            [n.token_ids for n in neighbours],
        )

    def _identity(
        self,
        preparation: Preparation,
        prefix_ids: tuple[int, ...],
        token_ids: tuple[int, ...],
        neighbours: Sequence[Neighbour],
    ) -> EntryIdentity:
        runtime = self._runtime
        return EntryIdentity(
            model=runtime.model.runner.digest,
            namespace=self._catalog.namespace,
            preparation=str(preparation),
            prefix_ids=prefix_ids,
            codec=runtime.codec.name,
            token_ids=token_ids,
            behind=tuple(n.chunk_id for n in neighbours),
        )
