"""Conditions on documents' metadata, in the JSON form of OpenAI's vector stores.

A comparison is ``{"type": "gte", "key": "year", "value": 2020}``; several are joined by
``{"type": "and", "filters": [...]}`` or ``"or"``. A key names a field of the metadata, a dot goes
into an object (a field whose own name holds the dot goes first). Rules:

- ``eq ne gt gte lt lte`` take a string, a number or a boolean; ``in nin`` a list of those.
- Values of different kinds are never equal and are not ordered; a boolean is not a number.
  ``gt gte lt lte`` take numbers, or strings by code point (so ISO dates are in order).
- A field that is a list meets a condition if one of its values does.
- A field that is missing or null is not equal to anything: of the comparisons, it meets ``ne`` and
  ``nin`` alone. These two are the exact opposites of ``eq`` and ``in``.

Knows nothing of stores.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, get_args

from chunkcache.documents import JsonValue, Metadata
from chunkcache.errors import InvalidValueError

MAX_DEPTH = 16
MAX_CONDITIONS = 1_000
"""Comparisons and listed values of one filter; more would hold up every other search."""

Scalar = str | int | float | bool
ComparisonType = Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
CompoundType = Literal["and", "or"]

_ORDERED: Mapping[str, Callable[[Any, Any], bool]] = {
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}
_LISTED = ("in", "nin")
_TYPES = (*get_args(ComparisonType), *get_args(CompoundType))


class MetadataFilter(Protocol):
    """A condition on one document's metadata."""

    def matches(self, metadata: Metadata) -> bool:
        """Whether a document with this metadata is wanted."""
        ...


@dataclass(frozen=True)
class Comparison:
    """One field against one value, or against several.

    Attributes:
        type: How.
        key: The field.
        values: One value; for ``in`` and ``nin`` any number.
    """

    type: ComparisonType
    key: str
    values: tuple[Scalar, ...]

    def matches(self, metadata: Metadata) -> bool:
        """See :class:`MetadataFilter`."""
        found = _look_up(metadata, self.key)
        held = found if isinstance(found, list) else [found]
        if self.type in _ORDERED:
            (bound,) = self.values
            holds = _ORDERED[self.type]
            return any(_kind(v) == _kind(bound) != "bool" and holds(v, bound) for v in held)
        is_equal = any(_kind(v) == _kind(w) and v == w for v in held for w in self.values)
        return is_equal == (self.type in ("eq", "in"))


@dataclass(frozen=True)
class Compound:
    """Several filters together.

    Attributes:
        type: Whether all must match, or one.
        filters: At least one.
    """

    type: CompoundType
    filters: tuple[MetadataFilter, ...]

    def matches(self, metadata: Metadata) -> bool:
        """See :class:`MetadataFilter`."""
        join = all if self.type == "and" else any
        return join(f.matches(metadata) for f in self.filters)


def parse_filter(value: object, *, param: str = "filters") -> MetadataFilter:
    """Read a filter from its JSON form.

    Args:
        value: The decoded JSON.
        param: The field that it came in, for messages.

    Raises:
        InvalidValueError: It is not a filter; the message names the place and what is expected.
    """
    parsed, _ = _parse(value, param, MAX_DEPTH, MAX_CONDITIONS)
    return parsed


def _parse(value: object, where: str, depth: int, num_left: int) -> tuple[MetadataFilter, int]:
    """A filter, and how many more conditions there may be."""
    if depth < 1:
        raise InvalidValueError(f"filters are nested over {MAX_DEPTH} deep", param=where)
    if not isinstance(value, Mapping):
        raise InvalidValueError(f"{where} is not an object", param=where)
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise InvalidValueError(
            f"{where}.type is {_shown(kind)}, not one of {', '.join(_TYPES)}",
            param=f"{where}.type",
        )
    if kind in get_args(CompoundType):
        _check_fields(value, ("type", "filters"), where)
        return _parse_compound(cast(CompoundType, kind), value["filters"], where, depth, num_left)
    _check_fields(value, ("type", "key", "value"), where)
    key, given = value["key"], value["value"]
    if not isinstance(key, str) or not key:
        raise InvalidValueError(f"{where}.key is not a field's name", param=f"{where}.key")
    if (kind in _LISTED) != isinstance(given, list):
        wanted = "a list" if kind in _LISTED else "one string, number or boolean"
        raise InvalidValueError(
            f"{where}.value is {_shown(given)}; {kind!r} takes {wanted}", param=f"{where}.value"
        )
    values = given if isinstance(given, list) else [given]
    for item in values:
        _check_scalar(kind, item, f"{where}.value")
    num_left -= max(len(values), 1)
    if num_left < 0:
        raise InvalidValueError(f"a filter of over {MAX_CONDITIONS} conditions", param=where)
    return Comparison(cast(ComparisonType, kind), key, tuple(values)), num_left


def _parse_compound(
    kind: CompoundType, parts: object, where: str, depth: int, num_left: int
) -> tuple[MetadataFilter, int]:
    if not isinstance(parts, list) or not parts:
        raise InvalidValueError(
            f"{where}.filters is not a list of at least one filter", param=f"{where}.filters"
        )
    filters: list[MetadataFilter] = []
    for i, part in enumerate(parts):
        parsed, num_left = _parse(part, f"{where}.filters[{i}]", depth - 1, num_left)
        filters.append(parsed)
    return Compound(kind, tuple(filters)), num_left


def _check_fields(value: Mapping[Any, Any], names: Sequence[str], where: str) -> None:
    if missing := [name for name in names if name not in value]:
        raise InvalidValueError(
            f"{where} has no {missing[0]!r}; {value['type']!r} takes {', '.join(names)}",
            param=f"{where}.{missing[0]}",
        )
    if unknown := [name for name in value if name not in names]:
        raise InvalidValueError(
            f"{where} has a field {_shown(unknown[0])}; {value['type']!r} takes {', '.join(names)}",
            param=where,
        )


def _check_scalar(kind: str, value: object, where: str) -> None:
    is_finite = not isinstance(value, float) or value - value == 0
    if not isinstance(value, str | int | float) or not is_finite:
        raise InvalidValueError(
            f"{where} holds {_shown(value)}, not a string, number or boolean", param=where
        )
    if kind in _ORDERED and isinstance(value, bool):
        raise InvalidValueError(f"{where} is a boolean, which {kind!r} cannot order", param=where)


def _look_up(metadata: Metadata, key: str) -> JsonValue:
    if key in metadata:
        return metadata[key]
    found: Any = metadata
    for name in key.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(name)
    return found


def _kind(value: JsonValue) -> str:
    """What a value may be compared with; null and nested values with nothing a filter holds."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "other"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
