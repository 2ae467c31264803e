"""Haystack's filters as the cache's own (docs/retrieval.md)."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from haystack.dataclasses import Document
from haystack.errors import FilterError

_OPERATORS = {
    "==": "eq",
    "!=": "ne",
    ">": "gt",
    ">=": "gte",
    "<": "lt",
    "<=": "lte",
    "in": "in",
    "not in": "nin",
}
_OPPOSITES = {"eq": "ne", "ne": "eq", "in": "nin", "nin": "in"}
_DOCUMENT_FIELDS = frozenset(f.name for f in fields(Document)) - {"meta"}


def translated(filters: Mapping[str, Any]) -> dict[str, Any]:
    """A filter in the cache's form.

    Raises:
        FilterError: It is none, asks for another field than the metadata, or negates an order,
            which the cache has no form for.
    """
    return _translated(filters, negated=False)


def _translated(filters: Mapping[str, Any], *, negated: bool) -> dict[str, Any]:
    operator = filters.get("operator")
    if "field" in filters:
        return _comparison(filters, negated=negated)
    conditions = filters.get("conditions")
    if operator not in ("AND", "OR", "NOT") or not isinstance(conditions, list) or not conditions:
        raise FilterError("a filter has a field, or an operator AND, OR or NOT with conditions")
    if operator == "NOT":  # that all of its conditions hold
        negated = not negated
    # By De Morgan, so that only comparisons are ever denied.
    is_or = (operator == "OR") != negated
    parts = [_translated(c, negated=negated) for c in conditions]
    return {"type": "or" if is_or else "and", "filters": parts}


def _comparison(filters: Mapping[str, Any], *, negated: bool) -> dict[str, Any]:
    if missing := [name for name in ("operator", "value") if name not in filters]:
        raise FilterError(f"a comparison has no {missing[0]!r}")
    kind = _OPERATORS.get(filters["operator"])
    if kind is None:
        raise FilterError(f"there is no operator {filters['operator']!r}")
    if negated and kind not in _OPPOSITES:
        raise FilterError(f"the cache cannot search for what is not {filters['operator']!r}")
    field = str(filters["field"])
    if field in _DOCUMENT_FIELDS:
        raise FilterError(f"the cache searches by metadata, not by {field!r}")
    value = filters["value"]
    return {
        "type": _OPPOSITES[kind] if negated else kind,
        "key": field.removeprefix("meta."),
        "value": list(value) if kind in ("in", "nin") else value,
    }
