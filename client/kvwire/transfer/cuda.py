"""Gather and scatter of rows in CUDA memory.

Rows of a quarter MiB and more (block-outermost storage) are copied one by one, by plain DMA. Smaller ones are
gathered by one kernel into a buffer on the device, which then crosses the bus as one copy. Host memory should
be page-locked (`register_host`): otherwise the driver copies once more.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Final

from kvwire.errors import LayoutUnsupported
from kvwire.transfer.torch_pages import import_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.transfer.arena import Arena
    from kvwire.transfer.base import ByteArray
    from kvwire.transfer.geometry import Index, LayerPages, Segment

logger = logging.getLogger(__name__)

DMA_BYTES: Final = 256 << 10
BUFFER_BYTES: Final = 32 << 20


class CudaMover:
    """One copy stream and one buffer on the device. Calls from several threads take turns."""

    max_threads: Final = 1

    def __init__(self, device: Any) -> None:
        self._torch = import_torch()
        self._device = device
        self._stream = self._torch.cuda.Stream(device)
        self._buffer: Any = None
        self._fence: Any = None
        self._lock = threading.Lock()

    def span(self, layers: Sequence[LayerPages]) -> None:
        """Rows are written by the device."""

    def fence(self) -> None:
        """Called on the engine's thread: the next moves begin after what its current stream has been told."""
        event = self._torch.cuda.Event()
        event.record(self._torch.cuda.current_stream(self._device))
        self._fence = event

    def gather(self, segment: Segment, index: Index, out: ByteArray) -> None:
        """Rows `index` into `out`; returns when the bytes are there."""
        self._move(segment, index, self._torch.from_numpy(out), self._gather_step)

    def scatter(self, segment: Segment, index: Index, data: ByteArray) -> None:
        """`data` into rows `index`; returns when the bytes are there."""
        self._move(segment, index, self._torch.from_numpy(data), self._scatter_step)

    def part(self, segment: Segment, row: int, start: int, stop: int) -> Any:
        place = segment.origin + row * segment.row_bytes
        return _Part(self, segment.memory[place + start : place + stop])

    def _move(self, segment: Segment, index: Index, host: Any, step: Any) -> None:
        if not segment.on_grid:
            raise LayoutUnsupported(
                "CUDA pages with gaps inside of a row's length.", problem="page alignment"
            )
        rows = _grid(self._torch, segment)
        packed = host.view(rows.dtype).view(-1, rows.shape[1])
        with self._lock, self._torch.cuda.stream(self._stream):
            if self._fence is not None:
                self._stream.wait_event(self._fence)
            if segment.row_bytes >= DMA_BYTES:
                for i, row in enumerate(index.tolist()):
                    step(rows[row : row + 1], None, packed[i : i + 1])
            else:
                self._in_batches(rows, index, packed, step)
            self._stream.synchronize()

    def _in_batches(self, rows: Any, index: Index, packed: Any, step: Any) -> None:
        numbers = self._torch.from_numpy(index).to(self._device, non_blocking=True)
        count = max(1, BUFFER_BYTES // (rows.shape[1] * rows.element_size()))
        for first in range(0, len(index), count):
            step(rows, numbers[first : first + count], packed[first : first + count])

    def _gather_step(self, rows: Any, numbers: Any, packed: Any) -> None:
        if numbers is None:
            packed.copy_(rows, non_blocking=True)
            return
        buffer = self._buffer_for(packed)
        self._torch.index_select(rows, 0, numbers, out=buffer)
        packed.copy_(buffer, non_blocking=True)

    def _scatter_step(self, rows: Any, numbers: Any, packed: Any) -> None:
        if numbers is None:
            rows.copy_(packed, non_blocking=True)
            return
        buffer = self._buffer_for(packed)
        buffer.copy_(packed, non_blocking=True)
        rows.index_copy_(0, numbers, buffer)

    def _buffer_for(self, packed: Any) -> Any:
        if self._buffer is None:
            self._buffer = self._torch.empty(BUFFER_BYTES, dtype=self._torch.uint8, device=self._device)
        size = packed.numel() * packed.element_size()
        if size > self._buffer.numel():  # one row that is larger than the buffer
            return self._torch.empty_like(packed, device=self._device)
        return self._buffer[:size].view(packed.dtype).view(packed.shape)

    def copy_part(self, target: Any, source: Any) -> None:
        with self._lock, self._torch.cuda.stream(self._stream):
            if self._fence is not None:
                self._stream.wait_event(self._fence)
            target.copy_(source)
            self._stream.synchronize()


class _Part:
    """Some bytes of one row, for the ends of a range that does not fit rows."""

    def __init__(self, mover: CudaMover, memory: Any) -> None:
        self._mover = mover
        self._memory = memory

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        host = import_torch().empty(self._memory.shape, dtype=self._memory.dtype)
        self._mover.copy_part(host, self._memory)
        return host.numpy()

    def __setitem__(self, key: slice, data: ByteArray) -> None:
        self._mover.copy_part(self._memory[key], import_torch().from_numpy(data))


def register_host(array: ByteArray) -> bool:
    """Page-lock host memory for the device. False when the driver refuses: copies work, but slower."""
    torch = import_torch()
    done: bool = int(torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, 0)) == 0
    return done


def unregister_host(array: ByteArray) -> None:
    import_torch().cuda.cudart().cudaHostUnregister(array.ctypes.data)


class PageLock:
    """Keeps an arena page-locked for the device while it grows, so that a copy is one DMA.

    A driver that refuses is told to nobody twice: copies work without, but slower.
    """

    def __init__(
        self,
        arena: Arena,
        register: Callable[[ByteArray], bool] = register_host,
        unregister: Callable[[ByteArray], None] = unregister_host,
    ) -> None:
        self._arena = arena
        self._register = register
        self._unregister = unregister
        self._upto = arena.base
        self._locked: list[ByteArray] = []
        self._lock = threading.Lock()

    def cover(self) -> None:
        """Lock what the arena has grown by since the last call."""
        if self._arena.allocated <= self._upto:
            return
        with self._lock:
            end = self._arena.allocated
            if end <= self._upto:
                return
            grown = self._arena.array(self._upto, end - self._upto)
            self._upto = end
            if self._register(grown):
                self._locked.append(grown)
            else:
                logger.warning("kvwire: the driver does not page-lock the arena; copies will be slower")

    def close(self) -> None:
        """Before the arena is unmapped."""
        with self._lock:
            locked, self._locked = self._locked, []
        for part in locked:
            self._unregister(part)


def _grid(torch: Any, segment: Segment) -> Any:
    """The segment's rows as a matrix, of int64 where the alignment allows: that is what copies fast."""
    wide = segment.row_bytes % 8 == 0 and segment.origin % 8 == 0
    count = (segment.memory.numel() - segment.origin) // segment.row_bytes
    flat = segment.memory[segment.origin : segment.origin + count * segment.row_bytes]
    return flat.view(torch.int64 if wide else torch.uint8).view(count, -1)
