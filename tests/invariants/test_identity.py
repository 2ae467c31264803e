"""Invariant 5: whatever an entry depends on is in its key; whatever differs is a miss."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkcache.errors import InvalidValueError
from chunkcache.identity import (
    EntryIdentity,
    ModelDigest,
    ModelIdentity,
    TenantNamespace,
    TokenizerDigest,
    digest_fields,
    encode_token_ids,
    tenant_namespace,
)

IDENTITY = EntryIdentity(
    ModelDigest(b"m" * 32), TenantNamespace(b"n" * 32), "alone", (), "bf16", (1, 23)
)
MODEL = ModelIdentity(b"w", b"c", b"r", TokenizerDigest(b"t"), None, "float32")

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=20)


@given(token_ids, token_ids)
def test_different_ids_never_share_an_encoding(a: list[int], b: list[int]) -> None:
    assert (encode_token_ids(a) == encode_token_ids(b)) == (a == b)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20))
def test_the_container_does_not_matter(ids: list[int]) -> None:
    expected = encode_token_ids(ids)
    for container in (tuple(ids), np.array(ids, dtype=np.int64), torch.tensor(ids)):
        assert encode_token_ids(container) == expected


@pytest.mark.parametrize("bad", [[True, 1], [-1], [2**32], ["1"], [1.5], [None]])
def test_what_is_no_token_id_is_refused(bad: list[Any]) -> None:
    with pytest.raises(InvalidValueError):
        encode_token_ids(bad)


fields = st.lists(
    st.tuples(
        st.text(max_size=4), st.none() | st.binary(max_size=4) | st.text(max_size=4) | st.integers()
    ),
    max_size=4,
)


@given(fields, fields)
def test_field_lists_are_framed(a: list[Any], b: list[Any]) -> None:
    assert (digest_fields("x", a) == digest_fields("x", b)) == (
        [(n, type(v), v) for n, v in a] == [(n, type(v), v) for n, v in b]
    )


def test_every_field_changes_the_key() -> None:
    others = [
        replace(IDENTITY, model=ModelDigest(b"M" * 32)),
        replace(IDENTITY, namespace=TenantNamespace(b"N" * 32)),
        replace(IDENTITY, preparation="preamble"),
        replace(IDENTITY, prefix_ids=(1,)),
        replace(IDENTITY, codec="raw32"),
        replace(IDENTITY, token_ids=(12, 3)),
        replace(IDENTITY, token_ids=(1, 23, 0)),
    ]
    keys = {i.key() for i in [IDENTITY, *others]}
    assert len(keys) == len(others) + 1
    assert all(len(k) == 32 for k in keys)


def test_every_fact_about_the_model_changes_its_digest() -> None:
    changes: list[dict[str, Any]] = [
        {"weights": b"W"},
        {"config": b"C"},
        {"rope": b"R"},
        {"tokenizer": TokenizerDigest(b"T")},
        {"adapter": b"a"},
        {"adapter": b""},
        {"compute_dtype": "bfloat16"},
        {"weights_format": "int8-rows-1"},
    ]
    digests = {MODEL.digest()} | {replace(MODEL, **change).digest() for change in changes}
    assert len(digests) == len(changes) + 1


def test_namespaces_need_the_secret() -> None:
    assert tenant_namespace(b"s" * 32, "a") != tenant_namespace(b"t" * 32, "a")
    assert tenant_namespace(b"s" * 32, "a") != tenant_namespace(b"s" * 32, "b")


def test_other_weights_under_the_same_name_miss(
    open_cache: Callable[..., Any], model_dir: Callable[..., Any], passages: dict[str, str]
) -> None:
    first = open_cache(model=model_dir(seed=0))
    first.put("tower", passages["tower"])
    first.close()
    second = open_cache(model=model_dir(seed=1))
    answer = second.answer("Who keeps the key?", ["tower"])
    assert answer.report.documents[0].source == "computed"
    assert answer.report.account.cached_tokens == 0
    fresh = open_cache("other-store", model=model_dir(seed=1))
    fresh.put("tower", passages["tower"])
    assert fresh.answer("Who keeps the key?", ["tower"]).token_ids == answer.token_ids
    second.close()
    again = open_cache(model=model_dir(seed=0))
    assert again.answer("Who keeps the key?", ["tower"]).report.documents[0].source == "disk"
