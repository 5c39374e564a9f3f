from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.server.store import ExtentAllocator

SIZES = st.sampled_from([1, 64, 100, 128, 640])


def test_offsets_start_at_the_base_and_never_overlap() -> None:
    allocator = ExtentAllocator(640, base=64, alignment=64)
    offsets = [allocator.allocate(64) for _ in range(10)]
    assert sorted(offset for offset in offsets if offset is not None) == list(range(64, 704, 64))
    assert allocator.allocate(1) is None
    allocator.check_integrity()


def test_accounting_is_in_rounded_bytes() -> None:
    allocator = ExtentAllocator(1024, alignment=64)
    offset = allocator.allocate(65)
    assert offset is not None
    assert allocator.used == 128
    assert allocator.free_bytes == 896
    assert allocator.free(offset) == 128
    assert allocator.used == 0


def test_freed_neighbours_coalesce() -> None:
    allocator = ExtentAllocator(256, alignment=64)
    offsets = [allocator.allocate(64) for _ in range(4)]
    for index in (0, 2, 1, 3):
        offset = offsets[index]
        assert offset is not None
        allocator.free(offset)
        allocator.check_integrity()
    assert allocator.allocate(256) is not None


def test_an_exact_fit_is_taken_before_a_larger_extent_is_split() -> None:
    allocator = ExtentAllocator(640, alignment=64)
    hole, wall = allocator.allocate(64), allocator.allocate(64)
    assert hole is not None
    assert wall is not None
    allocator.free(hole)
    assert allocator.allocate(64) == hole


def test_freeing_twice_or_what_was_never_allocated_is_refused() -> None:
    allocator = ExtentAllocator(640, alignment=64)
    offset = allocator.allocate(64)
    assert offset is not None
    allocator.free(offset)
    for bad in (offset, 7, -64, 10_000):
        with pytest.raises(KeyError):
            allocator.free(bad)
    allocator.check_integrity()


@pytest.mark.parametrize(
    "bad", [{"capacity": 10}, {"capacity": 640, "base": 3}, {"capacity": 640, "base": -64}]
)
def test_geometry_that_does_not_fit_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        ExtentAllocator(**bad, alignment=64)


def largest_gap(live: dict[int, int]) -> int:
    edges = [128, *(edge for start in sorted(live) for edge in (start, start + live[start])), 128 + 2048]
    return max(end - start for start, end in zip(edges[::2], edges[1::2], strict=True))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(SIZES, st.integers(-20, -1)), max_size=60))
def test_any_sequence_keeps_every_byte(steps: list[int]) -> None:
    """A positive step allocates that size, a negative one frees one of the live extents."""
    allocator = ExtentAllocator(2048, base=128, alignment=64)
    live: dict[int, int] = {}
    for step in steps:
        if step > 0:
            offset = allocator.allocate(step)
            rounded = allocator.rounded(step)
            if offset is None:
                assert rounded > largest_gap(live)
                continue
            assert offset >= 128
            assert offset + rounded <= 128 + 2048
            assert all(offset + rounded <= start or start + size <= offset for start, size in live.items())
            live[offset] = rounded
        elif live:
            offset = sorted(live)[step % len(live)]
            assert allocator.free(offset) == live.pop(offset)
        assert allocator.used == sum(live.values())
        allocator.check_integrity()
    for offset in live:
        allocator.free(offset)
    assert allocator.allocate(2048) == 128
