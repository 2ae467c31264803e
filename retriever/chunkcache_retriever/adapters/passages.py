"""How a passage names its place, in words that every framework's metadata can carry."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from chunkcache.errors import InvalidValueError
from chunkcache_retriever.adapters.client import ContextPart, Passage

PLACE_KEY: Final = "chunkcache"
"""Metadata field of a retrieved passage: ``{"document_id", "chunk_index", "start", "end", "score"}``.
It is what makes an answer hit by id, whatever happened to the passage's text on the way."""

CONTEXT_KEY: Final = "chunkcache_context"
"""Field of a message's metadata: what stands in front of it, as :func:`context_fields` writes it."""


@dataclass(frozen=True)
class Place:
    """A chunk of a stored document."""

    document_id: str
    chunk_index: int


def place_metadata(passage: Passage) -> dict[str, Any]:
    """A passage's metadata in a framework: the document's, and its place."""
    place = {
        "document_id": passage.document_id,
        "chunk_index": passage.chunk_index,
        "start": passage.start,
        "end": passage.end,
        "score": passage.score,
    }
    return {**passage.metadata, PLACE_KEY: place}


def place_of(metadata: Mapping[str, Any]) -> Place | None:
    """The place that metadata name; None where they name none."""
    place = metadata.get(PLACE_KEY)
    if not isinstance(place, Mapping):
        return None
    document_id, index = place.get("document_id"), place.get("chunk_index")
    if not isinstance(document_id, str) or not isinstance(index, int) or isinstance(index, bool):
        return None
    return Place(document_id, index)


def context_of(found: Iterable[Place | ContextPart]) -> tuple[ContextPart, ...]:
    """Passages as what stands in a prompt: one part per document, where its best passage was.

    A document's chunks come together, in its own order, as ``Retriever.retrieve`` gives them; so
    the same passages are the same prompt on every way to it.
    """
    parts: dict[object, ContextPart] = {}
    indexes: dict[str, set[int]] = {}
    for item in found:
        if isinstance(item, ContextPart):
            parts[item] = item
            continue
        held = indexes.setdefault(item.document_id, set())
        held.add(item.chunk_index)
        parts[item.document_id] = ContextPart(item.document_id, tuple(sorted(held)))
    return tuple(parts.values())


def context_fields(context: Iterable[ContextPart]) -> list[dict[str, Any]]:
    """What stands in front of a message, as plain values that any framework serialises."""
    fields = []
    for part in context:
        given: dict[str, Any] = {"document_id": part.document_id}
        if part.chunk_indexes is not None:
            given["chunk_indexes"] = list(part.chunk_indexes)
        if part.text is not None:
            given["text"] = part.text
        fields.append(given)
    return fields


def read_context(fields: Any, param: str = "messages") -> tuple[ContextPart, ...]:
    """What :func:`context_fields` wrote.

    Raises:
        InvalidValueError: It is something else.
    """
    try:
        return tuple(
            ContextPart(
                str(given["document_id"]),
                whole_numbers(given.get("chunk_indexes")),
                given.get("text"),
            )
            for given in fields
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise InvalidValueError(f"{CONTEXT_KEY} is not a list of documents", param=param) from error


def whole_numbers(values: Any) -> tuple[int, ...] | None:
    """Indexes of chunks; None stays None.

    Raises:
        TypeError: They are no list of whole numbers.
    """
    if values is None:
        return None
    if not isinstance(values, list | tuple) or not all(type(v) is int for v in values):
        raise TypeError("indexes of chunks are whole numbers")
    return tuple(values)
