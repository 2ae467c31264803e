"""Many documents in one body, line by line: what becomes of each, and of all of them.

A line that cannot be taken is reported and the others go on; a store or a model that fails ends
the run. What was stored stays, and the same body sent again costs a look-up a line.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import msgspec

from chunkcache.chunk_cache import ChunkCache
from chunkcache.documents import canonical_text, text_digest
from chunkcache.errors import (
    ChunkCacheError,
    DigestMismatchError,
    DrainingError,
    ModelError,
    StoreError,
)
from chunkcache.results import IngestResult
from chunkcache_api.error_responses import error_body
from chunkcache_api.json_body import parse_body
from chunkcache_api.schemas.bulk import BulkDocument
from chunkcache_api.schemas.documents import PutDocumentRequest


def put_document(cache: ChunkCache, identifier: str, body: PutDocumentRequest) -> IngestResult:
    """Store one document, if its text is the one that is expected.

    Raises:
        DigestMismatchError: It is another one; nothing was stored.
        ChunkCacheError: As in ``ChunkCache.put``.
    """
    if body.digest is not None:
        digest = text_digest(canonical_text(body.text)).hex()
        if digest != body.digest.lower():
            raise DigestMismatchError(f"the text's digest is {digest}", param="digest")
    return cache.put(
        identifier,
        body.text,
        body.metadata,
        text_format=body.format,
        expires_at=body.expires_at,
        ttl_seconds=body.ttl_seconds,
    )


class BulkRun:
    """Stores the documents of one body. Its steps run on threads, one after another.

    Args:
        cache: Where they go.
        body: The lines.
    """

    def __init__(self, cache: ChunkCache, body: bytes) -> None:
        self._cache = cache
        self._num_bytes = len(body)
        self._lines = _lines(body)
        self._statuses: Counter[str] = Counter()
        self._num_tokens = self._prefilled_tokens = 0
        self._started = time.perf_counter()
        self._is_over = False

    def step(self) -> bytes | None:
        """The next line's result; then what became of all of them; then None.

        Raises:
            ChunkCacheError: The store, the model or the server failed before anything was stored
                or refused: there are no results.
        """
        if self._is_over:
            return None
        line = next(self._lines, None)
        if line is None:
            return self._end(None)
        number, end, data = line
        place = {"line": number, "id": None, "progress": round(end / max(self._num_bytes, 1), 4)}
        try:
            document = parse_body(data, BulkDocument)
            place["id"] = document.id
            result = put_document(self._cache, document.id, document)
        except (StoreError, ModelError, DrainingError) as error:
            if not self._statuses:
                raise
            self._statuses["failed"] += 1
            return _line(place | {"status": "failed"} | error_body(error)) + self._end(error)
        except ChunkCacheError as error:
            self._statuses["failed"] += 1
            return _line(place | {"status": "failed"} | error_body(error))
        self._statuses[result.status] += 1
        self._num_tokens += result.num_tokens
        self._prefilled_tokens += result.prefilled_tokens
        fields = asdict(result)
        del fields["document_id"]
        return _line(place | fields)

    def _end(self, error: ChunkCacheError | None) -> bytes:
        self._is_over = True
        return _line(
            {
                "object": "chunkcache.bulk_result",
                "documents": self._statuses.total() - self._statuses["failed"],
                **{s: self._statuses[s] for s in ("created", "updated", "unchanged", "failed")},
                "tokens": self._num_tokens,
                "prefilled_tokens": self._prefilled_tokens,
                "seconds": round(time.perf_counter() - self._started, 3),
                "interrupted": error is not None,
                "error": None if error is None else error_body(error)["error"],
            }
        )


def _lines(body: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Lines that are not blank: number from 1, where it ends, and its bytes."""
    start = number = 0
    while start < len(body):
        number += 1
        newline = body.find(b"\n", start)
        end = len(body) if newline < 0 else newline
        line = body[start:end].strip()
        start = end + 1
        if line:
            yield number, min(start, len(body)), line


def _line(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"
