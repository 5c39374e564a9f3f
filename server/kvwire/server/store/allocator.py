from __future__ import annotations

from bisect import bisect_left, insort


class ExtentAllocator:
    """Extents of a byte range [base, base + capacity), for few distinct sizes.

    Exact-size buckets first, then best fit; neighbours coalesce when freed. Sizes are rounded up to
    `alignment`, and all accounting is in rounded bytes. Offsets are absolute (never below `base`).
    """

    def __init__(self, capacity: int, *, base: int = 0, alignment: int = 4096) -> None:
        if capacity < alignment or alignment < 1 or base % alignment or base < 0:
            raise ValueError("capacity, base and alignment do not fit together")
        self.capacity = capacity - capacity % alignment
        self.used = 0
        self._base = base
        self._alignment = alignment
        self._taken: dict[int, int] = {}
        self._size_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self._buckets: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []
        self._add_free(base, self.capacity)

    @property
    def free_bytes(self) -> int:
        return self.capacity - self.used

    def rounded(self, size: int) -> int:
        return -(-size // self._alignment) * self._alignment

    def allocate(self, size: int) -> int | None:
        """The offset of a new extent of `size` bytes (at least 1); None when no free one is large enough."""
        need = self.rounded(size)
        bucket = self._buckets.get(need)
        if bucket is None:
            index = bisect_left(self._sizes, need)
            if index == len(self._sizes):
                return None
            found = self._sizes[index]
            bucket = self._buckets[found]
        else:
            found = need
        # The most recently freed extent: its pages are warm.
        start = next(reversed(bucket))
        self._remove_free(start, found)
        if found > need:
            self._add_free(start + need, found - need)
        self._taken[start] = need
        self.used += need
        return start

    def free(self, offset: int) -> int:
        """Give an extent back; returns its rounded size. Raises KeyError for what is not allocated."""
        size = self._taken.pop(offset)
        self.used -= size
        start, end = offset, offset + size
        before = self._start_of_end.get(start)
        if before is not None:
            self._remove_free(before, start - before)
            start = before
        after = self._size_at.get(end)
        if after is not None:
            self._remove_free(end, after)
            end += after
        self._add_free(start, end - start)
        return size

    def check_integrity(self) -> None:
        """Raise AssertionError unless free and taken extents tile the range and every index agrees."""
        extents = sorted([*self._taken.items(), *self._size_at.items()])
        position = self._base
        last_free = False
        for start, size in extents:
            free = start in self._size_at
            _ensure(start == position and size > 0, f"gap or overlap at {position}")
            _ensure(not (free and last_free), f"free neighbours at {start} did not coalesce")
            position, last_free = start + size, free
        _ensure(position == self._base + self.capacity, "extents do not cover the range")
        _ensure(self.used == sum(self._taken.values()), "used bytes drifted")
        _ensure(self._sizes == sorted(self._buckets), "bucket sizes drifted")
        in_buckets = {start: size for size, bucket in self._buckets.items() for start in bucket}
        _ensure(in_buckets == self._size_at and all(self._buckets.values()), "buckets drifted")
        ends = {start + size: start for start, size in self._size_at.items()}
        _ensure(ends == self._start_of_end, "ends drifted")

    def _add_free(self, start: int, size: int) -> None:
        self._size_at[start] = size
        self._start_of_end[start + size] = start
        bucket = self._buckets.get(size)
        if bucket is None:
            bucket = self._buckets[size] = {}
            insort(self._sizes, size)
        bucket[start] = None

    def _remove_free(self, start: int, size: int) -> None:
        del self._size_at[start]
        del self._start_of_end[start + size]
        bucket = self._buckets[size]
        del bucket[start]
        if not bucket:
            del self._buckets[size]
            del self._sizes[bisect_left(self._sizes, size)]


def _ensure(condition: bool, problem: str) -> None:
    if not condition:
        raise AssertionError(problem)
