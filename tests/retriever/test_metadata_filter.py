"""Filters on metadata: what matches, and what is said about a filter that is none."""

import operator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkcache.errors import InvalidValueError
from chunkcache_retriever.metadata_filter import MAX_CONDITIONS, MAX_DEPTH, parse_filter


def compare(kind: str, value: Any, key: str = "x") -> dict[str, Any]:
    return {"type": kind, "key": key, "value": value}


@pytest.mark.parametrize(
    ("kind", "value", "held", "expected"),
    [
        ("eq", "a", "a", True),
        ("eq", 1, 1.0, True),
        ("eq", 1, True, False),
        ("eq", "1", 1, False),
        ("eq", "a", None, False),
        ("ne", "a", "b", True),
        ("ne", "a", None, True),
        ("ne", 1, "1", True),
        ("gt", 2, 3, True),
        ("gt", 3, 3, False),
        ("gte", 3, 3, True),
        ("lt", "2024-02-01", "2024-01-31", True),
        ("lte", "b", "b", True),
        ("lt", 5, "1", False),
        ("lt", 5, None, False),
        ("gt", 0, True, False),
        ("in", ["a", 2], 2, True),
        ("in", [], "a", False),
        ("nin", ["a"], "b", True),
        ("nin", ["a"], None, True),
        ("eq", "a", ["b", "a"], True),
        ("ne", "a", ["b", "a"], False),
        ("gt", 5, [1, 9], True),
        ("nin", ["c"], ["b", "a"], True),
        ("eq", "a", {"a": 1}, False),
    ],
)
def test_comparisons(kind: str, value: Any, held: Any, expected: bool) -> None:
    assert parse_filter(compare(kind, value)).matches({"x": held}) is expected


def test_missing_fields_are_as_null() -> None:
    assert parse_filter(compare("ne", 1)).matches({})
    assert not parse_filter(compare("lte", 1)).matches({})


def test_a_dot_goes_into_objects_unless_the_name_has_one() -> None:
    nested = parse_filter(compare("eq", 1, "a.b"))
    assert nested.matches({"a": {"b": 1}})
    assert nested.matches({"a.b": 1, "a": {"b": 2}})
    assert not nested.matches({"a": 1})


def test_compounds() -> None:
    both = {"type": "and", "filters": [compare("gt", 1), compare("lt", 5)]}
    assert [parse_filter(both).matches({"x": x}) for x in (1, 3, 5)] == [False, True, False]
    either = {"type": "or", "filters": [both, compare("eq", 9)]}
    assert [parse_filter(either).matches({"x": x}) for x in (1, 3, 9)] == [False, True, True]


@pytest.mark.parametrize(
    ("value", "param", "words"),
    [
        (None, "filters", "not an object"),
        ([], "filters", "not an object"),
        ({}, "filters.type", "eq, ne, gt"),
        ({"type": "like", "key": "x", "value": 1}, "filters.type", "'like'"),
        ({"type": "eq", "value": 1}, "filters.key", "no 'key'"),
        ({"type": "eq", "key": "x"}, "filters.value", "no 'value'"),
        ({"type": "eq", "key": 3, "value": 1}, "filters.key", "field's name"),
        ({"type": "eq", "key": "x", "value": 1, "or": 2}, "filters", "'or'"),
        (compare("eq", [1]), "filters.value", "one string"),
        (compare("in", 1), "filters.value", "a list"),
        (compare("in", [None]), "filters.value", "None"),
        (compare("eq", float("nan")), "filters.value", "nan"),
        (compare("gt", True), "filters.value", "boolean"),
        ({"type": "and", "filters": []}, "filters.filters", "at least one"),
        (
            {"type": "and", "filters": [compare("eq", 1), compare("eq", {})]},
            "filters.filters[1].value",
            "{}",
        ),
        (compare("in", list(range(MAX_CONDITIONS + 1))), "filters", "over 1000 conditions"),
    ],
)
def test_what_is_wrong_is_said(value: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        parse_filter(value)
    assert caught.value.param == param
    assert words in caught.value.message


def test_depth_is_bounded() -> None:
    value: dict[str, Any] = compare("eq", 1)
    for _ in range(MAX_DEPTH - 1):
        value = {"type": "or", "filters": [value]}
    assert parse_filter(value).matches({"x": 1})
    with pytest.raises(InvalidValueError, match="deep"):
        parse_filter({"type": "or", "filters": [value]})


_SCALARS = st.one_of(st.integers(-3, 3), st.sampled_from(["", "a", "b"]), st.booleans())
_HELD = st.one_of(st.none(), _SCALARS, st.lists(_SCALARS, max_size=3))


@given(_HELD, _SCALARS, st.lists(_SCALARS, max_size=3))
def test_negations_are_exact(held: Any, value: Any, values: list[Any]) -> None:
    for positive, negative, given_value in (("eq", "ne", value), ("in", "nin", values)):
        found = [
            parse_filter(compare(k, given_value)).matches({"x": held}) for k in (positive, negative)
        ]
        assert found[0] is not found[1]


@given(st.integers(), st.integers())
def test_order_is_that_of_numbers(held: int, value: int) -> None:
    for kind, holds in (("gt", operator.gt), ("gte", operator.ge), ("lt", operator.lt)):
        assert parse_filter(compare(kind, value)).matches({"x": held}) is holds(held, value)
