from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.client import split
from kvwire.client.types import KeyRange, Limits, ObjectRange, SessionRange, TransferItem
from kvwire.keys import Namespace

NAMESPACE = Namespace("m")


def objects(items) -> list[tuple[int, int]]:
    """(chunk, group) of every object, as a server would read the items; two groups."""
    found = []
    for item in items:
        first, count = item.target.first_chunk, item.target.chunk_count
        ranges = item.ranges or [ObjectRange(group, first, count) for group in range(2)]
        for each in ranges:
            assert first <= each.first_chunk
            assert each.first_chunk + each.chunk_count <= first + count
            found += [
                (c, each.group_index) for c in range(each.first_chunk, each.first_chunk + each.chunk_count)
            ]
    return found


@st.composite
def items(draw):
    first, count = draw(st.integers(0, 50)), draw(st.integers(1, 60))
    ranges = []
    for group in range(2):
        if draw(st.booleans()):
            begin = draw(st.integers(0, count - 1))
            ranges.append(ObjectRange(group, first + begin, draw(st.integers(1, count - begin))))
    if draw(st.booleans()):
        target = SessionRange("s", first, count)
    else:
        target = KeyRange(NAMESPACE, tuple(i.to_bytes(32, "big") for i in range(first, first + count)), first)
    return TransferItem(target, tuple(ranges))


limits = st.builds(
    Limits,
    st.just(0),
    st.integers(0, 5),
    st.one_of(st.just(0), st.integers(1, 70)),
    st.one_of(st.just(0), st.integers(2, 70)),
)


@given(items(), limits)
def test_a_cut_item_names_the_same_objects_and_fits(item, limit):
    parts = split.cut(item, limit, 2)
    assert sorted(objects(parts)) == sorted(objects([item]))
    for part in parts:
        assert not limit.max_chunks or part.target.chunk_count <= limit.max_chunks
        assert not limit.max_slots or len(objects([part])) <= limit.max_slots
        if isinstance(part.target, KeyRange):
            assert part.target.keys[0] == part.target.first_chunk.to_bytes(32, "big")


@given(st.lists(items(), max_size=12), limits)
def test_batches_keep_order_and_stay_below_the_limits(asked, limit):
    parts = [part for item in asked for part in split.cut(item, limit, 2)]
    batches = list(split.transfer_batches(parts, limit, 2))
    assert [item for batch in batches for item in batch] == parts
    for batch in batches:
        assert batch
        assert not limit.max_items or len(batch) <= limit.max_items
        assert not limit.max_chunks or sum(item.target.chunk_count for item in batch) <= limit.max_chunks
        assert not limit.max_slots or len(objects(batch)) <= limit.max_slots


def test_batches_are_as_few_as_possible():
    ten = [TransferItem(SessionRange(str(i), 0, 4)) for i in range(10)]
    assert len(list(split.transfer_batches(ten, Limits(0, 10, 40, 80), 2))) == 1
    assert [len(b) for b in split.transfer_batches(ten, Limits(0, 10, 12, 80), 2)] == [3, 3, 3, 1]
    assert [len(b) for b in split.transfer_batches(ten, Limits(0, 4, 0, 0), 2)] == [4, 4, 2]


def test_bl59_messages_stay_below_the_byte_limit():
    keys = tuple(i.to_bytes(32, "big") for i in range(100_000))
    big = [TransferItem(KeyRange(NAMESPACE, keys), (ObjectRange(0, 0, 1),)) for _ in range(8)]
    batches = list(split.transfer_batches(big, Limits(16 << 20, 0, 0, 0), 1))
    assert [len(batch) for batch in batches] == [4, 4]
    huge = TransferItem(SessionRange("s", 0, 1_000_000))
    parts = split.cut(huge, Limits(), 2)
    assert max(len(objects([part])) for part in parts) * 96 < 16 << 20
    assert len(objects(parts)) == 2_000_000


def test_small_items_are_cut_by_number():
    assert [len(b) for b in split.batches(list(range(10)), Limits(0, 4, 1, 1))] == [4, 4, 2]
    assert [len(b) for b in split.batches(list(range(10)), Limits())] == [10]
    assert not list(split.batches([], Limits()))


@pytest.mark.parametrize("size", [0, 1 << 20, 64 << 20])
def test_there_is_always_room_for_something(size):
    assert 0 < split.message_room(Limits(max_message_bytes=size)) < 16 << 20
