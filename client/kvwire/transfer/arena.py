"""What the two kinds of arena share: bounds, views, and mapping pages ahead of their first use."""

from __future__ import annotations

import mmap
import threading
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from kvwire.errors import OutOfSpace, RangeInvalid
from kvwire.transfer import memory

if TYPE_CHECKING:
    from kvwire.transfer.base import ByteArray

T = TypeVar("T")

HEADER_BYTES: Final = 4096
"""The first page of an arena is never part of a slot, so an offset is never 0."""
DEFAULT_STEP: Final = 256 << 20


class Arena:
    """A mapping of `size` bytes of which the first `allocated` may be touched. Safe for several threads."""

    _populate = memory.MADV_POPULATE_READ
    """Enough for memory that is allocated already: it maps whole groups of pages, and for writing too."""

    def __init__(self, mapping: mmap.mmap, size: int) -> None:
        self.size: Final = size
        self._map: mmap.mmap | None = mapping
        self._bytes: ByteArray | None = np.frombuffer(mapping, dtype=np.uint8, count=size)
        self._view: memoryview | None = memoryview(mapping)
        self._address = int(self._bytes.ctypes.data)
        self._lock = threading.Lock()
        self._faulted = bytearray(-(-size // memory.HUGE_PAGE))

    @property
    def base(self) -> int:
        """The first offset that a slot may have."""
        return HEADER_BYTES

    @property
    def capacity(self) -> int:
        """How many bytes are for slots."""
        return self.size - HEADER_BYTES

    @property
    def allocated(self) -> int:
        """End of what has memory behind it. No view goes further: touching that could be a SIGBUS."""
        raise NotImplementedError

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes at `offset`, writable, no copy. Raises RangeInvalid outside of what is allocated."""
        self._check(offset, nbytes)
        return self._open(self._view)[offset : offset + nbytes]

    def array(self, offset: int, nbytes: int) -> ByteArray:
        """The same as an array of uint8."""
        self._check(offset, nbytes)
        return self._open(self._bytes)[offset : offset + nbytes]

    def prefault(self, offset: int, nbytes: int) -> None:
        """Map the pages of a range at once: a first touch page by page takes longer than the copy itself.

        Cheap when it was done before. Other threads run meanwhile.
        """
        first, last = offset // memory.HUGE_PAGE, -(-(offset + nbytes) // memory.HUGE_PAGE)
        missing = self._faulted.find(0, first, last)
        while missing >= 0:
            stop = self._faulted.find(1, missing, last)
            stop = last if stop < 0 else stop
            self._map_pages(missing, stop)
            missing = self._faulted.find(0, stop, last)

    def close(self) -> None:
        """Unmap. Views that are still in use keep the mapping alive until they go."""
        with self._lock:
            mapping, self._map, self._bytes = self._map, None, None
            view, self._view = self._view, None
            if view is not None:
                view.release()
        if mapping is not None:
            # Somebody still looks into it (BufferError): the mapping goes with the last view.
            try:
                mapping.close()
            except BufferError:
                del mapping

    def _map_pages(self, first: int, stop: int) -> None:
        begin = first * memory.HUGE_PAGE
        end = min(stop * memory.HUGE_PAGE, self.allocated)
        if begin < end and self._map is not None:
            memory.advise(self._address + begin, end - begin, self._populate)
        # The last page may be half allocated: it is looked at again when the arena has grown.
        for index in range(first, end // memory.HUGE_PAGE):
            self._faulted[index] = 1

    def _check(self, offset: int, nbytes: int) -> None:
        if offset < HEADER_BYTES or nbytes < 0 or offset + nbytes > self.allocated:
            raise RangeInvalid(
                f"{nbytes} bytes at {offset} are outside the {self.allocated} allocated bytes of the arena.",
                first=offset,
                count=nbytes,
                limit=self.allocated,
            )

    @staticmethod
    def _open(part: T | None) -> T:
        if part is None:
            raise RangeInvalid("The arena is closed.", first=0, count=0, limit=0)
        return part


class GrowingArena(Arena):
    """An arena whose owner allocates it step by step.

    With `maps_ahead` each step is also mapped into this process, for one that writes into the arena itself
    (UCX).
    """

    def __init__(self, mapping: mmap.mmap, size: int, step: int) -> None:
        super().__init__(mapping, size)
        self._step = max(step, mmap.PAGESIZE)
        self._allocated = 0
        self._grow = threading.Lock()
        self.maps_ahead = False

    @property
    def allocated(self) -> int:
        return self._allocated

    def ensure(self, upto: int) -> None:
        """Allocate so that offsets below `upto` may be used. Raises OutOfSpace when there is no memory.

        May take 0.3 s per GiB: not for an event loop, unless little is missing.
        """
        if upto <= self._allocated:
            return
        if upto > self.size:
            raise _no_memory(upto, self.size, "the arena is that small")
        with self._grow:
            before = self._allocated
            target = min(self.size, -(-upto // self._step) * self._step)
            if target > before and not self._allocate(target):
                self._allocate_exactly(upto)
            if self.maps_ahead:
                self.prefault(before, self._allocated - before)

    def unlink(self) -> None:
        """Take the arena's name away, if it has one. Idempotent."""
        raise NotImplementedError

    def _allocate_exactly(self, upto: int) -> None:
        target = -(-upto // mmap.PAGESIZE) * mmap.PAGESIZE
        if target > self._allocated and not self._allocate(min(target, self.size)):
            raise _no_memory(upto, self.size, "the system has no memory left for it")

    def _allocate(self, target: int) -> bool:
        raise NotImplementedError


class PrivateArena(GrowingArena):
    """Anonymous memory, for a server whose clients all come over UCX or inline."""

    _populate = memory.MADV_POPULATE_WRITE
    name: Final = ""
    nonce: Final = b""

    @classmethod
    def create(cls, size: int, *, step: int = DEFAULT_STEP, huge_pages: bool = True) -> PrivateArena:
        """`size` counts the bytes for slots."""
        total = size + HEADER_BYTES
        mapping = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        arena = cls(mapping, total, step)
        if huge_pages:
            memory.advise(arena._address, total, memory.MADV_HUGEPAGE)
        return arena

    def unlink(self) -> None:
        """Nothing to remove."""

    def _allocate(self, target: int) -> bool:
        # Memory comes with the first touch: the kernel has no promise to give for anonymous pages.
        self._allocated = target
        return True


def _no_memory(needed: int, capacity: int, why: str) -> OutOfSpace:
    return OutOfSpace(
        f"The arena cannot grow to {needed} bytes: {why}.", needed=needed, capacity=capacity, permanent=True
    )
