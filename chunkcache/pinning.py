"""Hints by document: keep its chunks in RAM for a time, or say when it is asked about next."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from chunkcache.catalog import Catalog
from chunkcache.entry_naming import EntryNames
from chunkcache.errors import (
    DocumentNotFoundError,
    DrainingError,
    InvalidValueError,
    PinLimitError,
)
from chunkcache.identity import ChunkKey, EntryIdentity
from chunkcache.runtime import Runtime


@dataclass(frozen=True)
class PinResult:
    """What ``ChunkCache.pin`` did.

    Attributes:
        num_documents: Documents named.
        num_chunks: Their distinct chunks that are pinned now.
        num_bytes: What these occupy in RAM.
        ttl_s: For how many seconds.
    """

    num_documents: int
    num_chunks: int
    num_bytes: int
    ttl_s: float


class DocumentPins:
    """Hints over one tenant's documents.

    Args:
        runtime: Where entries come from.
        catalog: The tenant's documents.
        names: Which entries their chunks want.
        system_ids: Tokens of the system prompt that questions come with.
    """

    def __init__(
        self, runtime: Runtime, catalog: Catalog, names: EntryNames, system_ids: tuple[int, ...]
    ) -> None:
        self._runtime = runtime
        self._catalog = catalog
        self._names = names
        self._system_ids = system_ids

    def pin(self, document_ids: Iterable[str], ttl_s: float) -> PinResult:
        """As ``ChunkCache.pin``."""
        if not (math.isfinite(ttl_s) and ttl_s > 0):
            raise InvalidValueError(f"a pin of {ttl_s} seconds", param="ttl_s")
        wanted = list(dict.fromkeys(document_ids))
        stack = self._runtime.stack
        new_keys: list[ChunkKey] = []
        num_chunks = num_bytes = 0
        try:
            for identity in self._identities(wanted):
                with self._runtime.ensure_entry(identity) as lease:
                    was_pinned = stack.is_pinned(lease.entry.key)
                    if stack.pin(lease.entry, ttl_s):
                        num_chunks += 1
                        num_bytes += lease.entry.num_bytes
                    if not was_pinned:
                        new_keys.append(lease.entry.key)
            self._runtime.check_current()
        except (PinLimitError, DrainingError):
            stack.unpin(new_keys)
            raise
        return PinResult(len(wanted), num_chunks, num_bytes, ttl_s)

    def unpin(self, document_ids: Iterable[str]) -> int:
        """As ``ChunkCache.unpin``."""
        identities = self._identities(list(dict.fromkeys(document_ids)))
        return self._runtime.stack.unpin(identity.key() for identity in identities)

    def next_use(self, document_ids: Iterable[str], in_s: float) -> int:
        """As ``ChunkCache.next_use``."""
        if not (math.isfinite(in_s) and in_s >= 0):
            raise InvalidValueError(f"a use in {in_s} seconds", param="in_s")
        num_held = 0
        for identity in self._identities(list(dict.fromkeys(document_ids))):
            with self._runtime.ensure_entry(identity) as lease:
                num_held += self._runtime.stack.expect_use(lease.entry, in_s)
        self._runtime.check_current()
        return num_held

    def _identities(self, document_ids: list[str]) -> tuple[EntryIdentity, ...]:
        """Of every distinct chunk of the documents."""
        found = self._catalog.get_many(document_ids)
        for document_id in document_ids:
            if document_id not in found:
                raise DocumentNotFoundError(
                    f"there is no document {document_id!r}", param="document_ids"
                )
        chunks = dict.fromkeys(c.token_ids for d in found.values() for c in d.chunks)
        return self._names.identities(list(chunks), self._system_ids)
