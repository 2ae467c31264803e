"""Where tokens lie: runs, spans, key slots and decode batches."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkcache_kernels.checks import KernelArgumentError
from chunkcache_kernels.paged import DecodeBatch, KeySlots, clip, spans_of

slot_lists = st.lists(st.integers(0, 40), unique=True, max_size=20)


def keys_at(slots: list[int]) -> KeySlots:
    return KeySlots.of(torch.tensor(slots, dtype=torch.int64), torch.arange(len(slots)))


@given(slot_lists)
def test_spans_list_every_slot_once_and_cannot_be_joined(slots: list[int]):
    spans = spans_of(torch.tensor(slots, dtype=torch.int64))
    listed = [s.first_slot + i for s in spans for i in range(s.end - s.start)]
    assert listed == slots
    for left, right in pairwise(spans):
        assert left.end == right.start
        assert right.first_slot != left.first_slot + left.end - left.start


@given(slot_lists, st.integers(0, 20), st.integers(0, 20))
def test_clipped_spans_keep_their_token_indices(slots: list[int], start: int, end: int):
    spans = clip(spans_of(torch.tensor(slots, dtype=torch.int64)), start, end)
    listed = {s.start + i: s.first_slot + i for s in spans for i in range(s.end - s.start)}
    assert listed == {t: slots[t] for t in range(len(slots)) if start <= t < end}


@pytest.mark.parametrize(
    ("slots", "start"),
    [([5, 6, 7], 5), ([5], 5), ([5, 7], None), ([7, 6, 5], None), ([5, 7, 6, 8], None), ([], None)],
)
def test_start_is_set_only_for_one_ascending_run(slots: list[int], start: int | None):
    assert keys_at(slots).start == start


@given(slot_lists, st.data())
def test_a_prefix_equals_key_slots_built_from_the_first_keys(slots: list[int], data):
    n = data.draw(st.integers(0, len(slots)))
    prefix, built = keys_at(slots).prefix(n), keys_at(slots[:n])
    assert (prefix.start, prefix.ascending) == (built.start, built.ascending)
    assert torch.equal(prefix.slots, built.slots)
    assert torch.equal(prefix.positions, built.positions)


def test_a_prefix_longer_than_the_keys_is_refused():
    with pytest.raises(KernelArgumentError, match="prefix of 4 keys asked from 3"):
        keys_at([1, 2, 3]).prefix(4)


def test_by_position_sorts_slots_with_their_positions():
    keys = KeySlots.of(torch.tensor([9, 4, 7]), torch.tensor([2, 0, 1]))
    assert not keys.ascending
    ordered = keys.by_position
    assert ordered.ascending
    assert ordered.slots.tolist() == [4, 7, 9]
    assert ordered.by_position is ordered


def test_read_is_a_view_of_a_run_and_a_copy_of_scattered_slots():
    pages = torch.arange(12.0).view(3, 4, 1, 1)
    run, scattered = keys_at([5, 6, 7]), keys_at([7, 5, 6])
    assert run.read(pages).flatten().tolist() == [5, 6, 7]
    assert scattered.read(pages).flatten().tolist() == [7, 5, 6]
    assert run.read(pages).data_ptr() == pages[1, 1].data_ptr()
    assert run.read(pages).stride() == scattered.read(pages).stride()


@given(
    pages=st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=6),
    page_tokens=st.integers(1, 5),
    data=st.data(),
)
def test_a_batch_locates_any_range_of_logical_tokens(pages: list[int], page_tokens: int, data):
    num_tokens = data.draw(st.integers(1, len(pages) * page_tokens))
    start = data.draw(st.integers(0, num_tokens - 1))
    end = data.draw(st.integers(start + 1, num_tokens))
    batch = DecodeBatch(
        torch.tensor([pages], dtype=torch.int32), torch.tensor([num_tokens]), page_tokens
    )
    expected = [pages[t // page_tokens] * page_tokens + t % page_tokens for t in range(start, end)]
    located = batch.locate(0, start, end)
    if isinstance(located, int):
        assert list(range(located, located + end - start)) == expected
    else:
        assert located.tolist() == expected
        assert keys_at(expected).start is None, "a run must be located as a run"
    assert batch.locate(0, start, end) is located


def test_spans_of_a_batch_join_neighbouring_pages_only():
    batch = DecodeBatch(
        torch.tensor([[3, 4, 9, -1], [0, -1, -1, -1], [-1] * 4], dtype=torch.int32),
        torch.tensor([11, 2, 0]),
        page_tokens=4,
    )
    shown = [[(s.start, s.end, s.first_slot) for s in spans] for spans in batch.spans]
    assert shown == [[(0, 8, 12), (8, 11, 36)], [(0, 2, 0)], []]
    assert batch.spans is batch.spans


def test_a_length_beyond_the_block_table_is_refused():
    batch = DecodeBatch(torch.zeros(1, 2, dtype=torch.int32), torch.tensor([9]), page_tokens=4)
    with pytest.raises(KernelArgumentError, match="sequence 0 has 9 tokens, its table holds 8"):
        _ = batch.lengths_tokens


@pytest.mark.parametrize(
    ("tables", "lengths", "page_tokens", "message"),
    [
        (torch.zeros(1, 2), torch.tensor([1]), 4, "must be int32"),
        (torch.zeros(1, 2, dtype=torch.int32), torch.tensor([1.0]), 4, "must be int64"),
        (torch.zeros(1, 2, dtype=torch.int32), torch.tensor([1, 1]), 4, "2 lengths"),
        (torch.zeros(1, 2, dtype=torch.int32), torch.tensor([1]), 0, "must be positive"),
        (torch.zeros(2, dtype=torch.int32), torch.tensor([1, 1]), 4, r"must be \[B,N\]"),
    ],
)
def test_a_batch_refuses_what_does_not_fit(tables, lengths, page_tokens: int, message: str):
    with pytest.raises(KernelArgumentError, match=message):
        DecodeBatch(tables, lengths, page_tokens)


def test_key_slots_refuse_what_does_not_fit():
    with pytest.raises(KernelArgumentError, match="2 slots but 3 positions"):
        KeySlots.of(torch.arange(2), torch.arange(3))
    with pytest.raises(KernelArgumentError, match="slots must be int64"):
        KeySlots.of(torch.arange(2).int(), torch.arange(2))
