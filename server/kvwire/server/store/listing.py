from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHIFT: Final = 10


class Listed(Protocol):
    """`serial` is the listing's to set."""

    serial: int


L = TypeVar("L", bound=Listed)


class Listing(Generic[L]):
    """Chunks in the order of their coming, for reading in pages.

    A chunk that is there all the time is met exactly once, whatever comes and goes between two pages.
    """

    def __init__(self) -> None:
        self._latest = 0
        # In buckets, so that a page begins near to where it has to.
        self._buckets: dict[int, dict[int, L]] = {}

    def add(self, chunk: L) -> None:
        self._latest += 1
        chunk.serial = self._latest
        self._buckets.setdefault(self._latest >> _SHIFT, {})[self._latest] = chunk

    def remove(self, chunk: L) -> None:
        bucket = self._buckets[chunk.serial >> _SHIFT]
        del bucket[chunk.serial]
        if not bucket:
            del self._buckets[chunk.serial >> _SHIFT]

    def after(self, serial: int) -> Iterator[L]:
        """Those that came after the chunk with this serial. Nothing may come or go meanwhile."""
        first = serial >> _SHIFT
        for number, bucket in self._buckets.items():
            if number > first:
                yield from bucket.values()
            elif number == first:
                yield from (chunk for chunk in bucket.values() if chunk.serial > serial)
