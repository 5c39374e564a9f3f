"""The paged KV of one worker as objects: gather blocks into bytes, scatter bytes into blocks.

An object of a KV group is `[layers][blocks of the chunk][page bytes]` with the order "layers" (storage with
the layers outermost) and `[blocks of the chunk][layers][page bytes]` with the order "blocks". Any byte range
of it can be moved by itself, at full speed when it begins and ends at a row (a page, in most layouts).
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np

from kvwire.errors import InvalidArgument, LayoutUnsupported, TransferFailed
from kvwire.transfer.crew import SPLIT_BYTES, crew, default_threads
from kvwire.transfer.geometry import SKIPPED, Geometry, LayerPages, Order, Run, Segment
from kvwire.transfer.host import HostMover

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from kvwire.transfer.base import ByteArray, Slot
    from kvwire.transfer.geometry import Index
    from kvwire.transfer.span import RowSpan

__all__ = ["BlockRows", "KvGroupPages", "PageMover", "pages_from_arrays", "pages_from_torch"]

BlockIds: TypeAlias = "Sequence[int | None] | NDArray[Any]"


class Move(Protocol):
    """Copies bytes [start, stop) of a run between its rows and `packed`."""

    def __call__(self, run: Run, start: int, stop: int, packed: ByteArray, /) -> None: ...


class Mover(Protocol):
    """Copies rows of one kind of memory (`HostMover`, `CudaMover`)."""

    def fence(self) -> None: ...
    def gather(self, segment: Segment, index: Index, out: ByteArray) -> None: ...
    def scatter(self, segment: Segment, index: Index, data: ByteArray) -> None: ...
    def part(self, segment: Segment, row: int, start: int, stop: int) -> Any: ...

    def span(self, layers: Sequence[LayerPages]) -> RowSpan | None:
        """A faster way to write rows, where there is one."""

    @property
    def max_threads(self) -> int:
        """How many may copy at once."""


class BlockRows:
    """Block ids of one object, checked and turned into rows once. For any number of moves."""

    __slots__ = ("_geometry", "_runs", "has_skips", "ids", "size_bytes")

    def __init__(self, ids: Index, geometry: Geometry) -> None:
        """Raises RangeInvalid for a block that does not exist."""
        self.has_skips = geometry.check(ids)
        self.ids = ids
        self.size_bytes = len(ids) * geometry.block_bytes
        self._geometry = geometry
        self._runs: tuple[Run, ...] = ()

    @property
    def runs(self) -> tuple[Run, ...]:
        if not self._runs:
            self._runs = self._geometry.runs(self.ids, has_skips=self.has_skips)
        return self._runs


class KvGroupPages:
    """One KV group of one worker."""

    def __init__(self, layers: Sequence[LayerPages], order: Order, mover: Mover, threads: int = 0) -> None:
        if threads < 0:
            raise InvalidArgument("threads", f"{threads} threads cannot copy")
        self._geometry = Geometry(layers, order)
        self._mover = mover
        self.threads: Final = min(threads or default_threads(), mover.max_threads)
        self._span = mover.span(layers)
        self.num_layers: Final = len(layers)
        self.page_bytes: Final = tuple(layer.page_bytes for layer in layers)

    @property
    def order(self) -> Order:
        return self._geometry.order

    @property
    def num_blocks(self) -> int:
        return self._geometry.num_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self._geometry.block_bytes

    def index(self, block_ids: BlockIds) -> BlockRows:
        """Prepare an object of these blocks. None or -1 is a block that `scatter_from` leaves alone.

        Raises RangeInvalid for a block that does not exist, InvalidArgument for no blocks.
        """
        if isinstance(block_ids, np.ndarray):
            ids = block_ids.astype(np.int64, copy=False)
        else:
            ids = np.array([SKIPPED if each is None else each for each in block_ids], dtype=np.int64)
        if not ids.size:
            raise InvalidArgument("block_ids", "an object has at least one block")
        return BlockRows(ids, self._geometry)

    def gather_into(
        self, blocks: BlockRows | BlockIds, out: ByteArray, start: int = 0, stop: int | None = None
    ) -> None:
        """Copy bytes [start, stop) of the object into `out`. Raises InvalidArgument for a skipped block."""
        rows = self._rows(blocks)
        if rows.has_skips:
            raise InvalidArgument("block_ids", "a block without an id cannot be stored")
        stop = _checked_stop(rows, out, start, stop)
        self._move(rows.runs, out, start, stop, self._gather)

    def scatter_from(
        self, blocks: BlockRows | BlockIds, data: ByteArray, start: int = 0, stop: int | None = None
    ) -> None:
        """Copy `data`, bytes [start, stop) of the object, into the pages, except those of skipped blocks."""
        rows = self._rows(blocks)
        stop = _checked_stop(rows, data, start, stop)
        span = self._span
        if span is None or rows.has_skips or start % span.row_bytes or stop % span.row_bytes:
            self._move(rows.runs, data, start, stop, self._scatter)
            return
        places = span.rows(rows.ids, self.order)

        def scatter(run: Run, first: int, last: int, part: ByteArray) -> None:
            span.scatter(run.rows[first // span.row_bytes : last // span.row_bytes], part)

        run = Run(Segment(None, 0, span.row_bytes, on_grid=False), places, 0, rows.size_bytes, False)
        self._move((run,), data, start, stop, scatter)

    def fence(self) -> None:
        """Let the next moves wait for what the caller's device stream has been told so far."""
        self._mover.fence()

    def _rows(self, blocks: BlockRows | BlockIds) -> BlockRows:
        return blocks if isinstance(blocks, BlockRows) else self.index(blocks)

    def _move(self, runs: Sequence[Run], packed: ByteArray, start: int, stop: int, move: Move) -> None:
        """In as many threads as wished."""
        jobs = min(self.threads, (stop - start) // SPLIT_BYTES)
        if jobs < 2 or crew.is_at_work:
            _move_range(runs, packed, start, stop, move)
            return
        cuts = [start, *(_row_at(runs, start + (stop - start) * i // jobs) for i in range(1, jobs)), stop]
        crew.run(
            [
                partial(_move_range, runs, packed[a - start : b - start], a, b, move)
                for a, b in itertools.pairwise(cuts)
            ]
        )

    def _gather(self, run: Run, start: int, stop: int, out: ByteArray) -> None:
        size = run.segment.row_bytes
        row, left = divmod(start, size)
        if left or stop % size:
            out[:] = self._mover.part(run.segment, int(run.rows[row]), left, left + stop - start)
        elif start < stop:
            self._mover.gather(run.segment, run.rows[row : stop // size], out)

    def _scatter(self, run: Run, start: int, stop: int, data: ByteArray) -> None:
        size = run.segment.row_bytes
        row, left = divmod(start, size)
        if left or stop % size:
            if run.rows[row] >= 0:
                self._mover.part(run.segment, int(run.rows[row]), left, left + stop - start)[:] = data
        elif start < stop:
            index = run.rows[row : stop // size]
            for first, last in _kept(index) if run.has_skips else ((0, len(index)),):
                self._mover.scatter(run.segment, index[first:last], data[first * size : last * size])


class PageMover:
    """`fill` and `drain` of a transfer: objects by (chunk_index, group_index), as slots name them."""

    def __init__(self, groups: Sequence[KvGroupPages], blocks: Mapping[tuple[int, int], BlockIds]) -> None:
        self._groups = groups
        self._blocks = blocks
        self._rows: dict[tuple[int, int], BlockRows] = {}

    def fill(self, slot: Slot, start: int, stop: int, out: ByteArray) -> None:
        self._groups[slot.group_index].gather_into(self._rows_of(slot), out, start, stop)

    def drain(self, slot: Slot, start: int, stop: int, data: ByteArray) -> None:
        self._groups[slot.group_index].scatter_from(self._rows_of(slot), data, start, stop)

    def _rows_of(self, slot: Slot) -> BlockRows:
        key = (slot.chunk_index, slot.group_index)
        rows = self._rows.get(key)
        if rows is None:
            rows = self._groups[slot.group_index].index(self._blocks[key])
            if rows.size_bytes != slot.size_bytes:
                raise TransferFailed(
                    f"Chunk {key[0]} of KV group {key[1]} has {rows.size_bytes} bytes here and"
                    f" {slot.size_bytes} bytes at the server.",
                    cause="length",
                )
            self._rows[key] = rows
        return rows


def pages_from_arrays(
    layers: Sequence[NDArray[np.uint8]], order: Order = "layers", *, threads: int = 0
) -> KvGroupPages:
    """A group whose layers are arrays of shape (blocks, page bytes), with any distance between the rows."""
    roots: dict[int, ByteArray] = {}
    return KvGroupPages([_layer_of(array, roots) for array in layers], order, HostMover(), threads)


def pages_from_torch(
    kv_caches: Mapping[str, Any],
    groups: Sequence[Sequence[str]],
    num_blocks: int,
    *,
    order: Order = "layers",
    threads: int = 0,
) -> list[KvGroupPages]:
    """The groups of an engine from its KV tensors, by layer name. Raises LayoutUnsupported.

    The first dimension of a tensor counts blocks (or the equal parts that a kernel cuts blocks into).
    """
    from kvwire.transfer import torch_pages

    mover = torch_pages.mover_for(kv_caches)
    memories = torch_pages.Memories()
    return [
        KvGroupPages([memories.layer(kv_caches[name], num_blocks) for name in names], order, mover, threads)
        for names in groups
    ]


def _layer_of(array: NDArray[np.uint8], roots: dict[int, ByteArray]) -> LayerPages:
    if array.ndim != 2 or array.dtype != np.uint8 or (array.shape[1] > 1 and array.strides[1] != 1):
        raise LayoutUnsupported(
            "A layer is an array of uint8 with shape (blocks, page bytes) and dense rows.",
            problem="array layout",
        )
    root: NDArray[Any] = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not root.flags.c_contiguous:
        raise LayoutUnsupported("A layer's memory is no contiguous allocation.", problem="array layout")
    address = int(root.ctypes.data)
    memory = roots.setdefault(address, root.reshape(-1).view(np.uint8))
    blocks, page = array.shape
    return LayerPages(memory, int(array.ctypes.data) - address, array.strides[0], blocks, page)


def _checked_stop(rows: BlockRows, packed: ByteArray, start: int, stop: int | None) -> int:
    stop = rows.size_bytes if stop is None else stop
    if not 0 <= start <= stop <= rows.size_bytes or packed.size != stop - start:
        raise InvalidArgument(
            "range", f"{packed.size} bytes for [{start}, {stop}) of an object of {rows.size_bytes} bytes"
        )
    return stop


def _move_range(runs: Sequence[Run], packed: ByteArray, start: int, stop: int, move: Move) -> None:
    for run in runs:
        first, last = max(start, run.start), min(stop, run.stop)
        if first < last:
            _move_run(run, first - run.start, last - run.start, packed[first - start : last - start], move)


def _move_run(run: Run, start: int, stop: int, packed: ByteArray, move: Move) -> None:
    """Whole rows by selection; cut rows at the ends by themselves."""
    size = run.segment.row_bytes
    if not start % size and not stop % size:
        move(run, start, stop, packed)
        return
    first, last = -(-start // size), stop // size
    if first > last:  # inside of one row
        move(run, start, stop, packed)
        return
    if start < first * size:
        move(run, start, first * size, packed[: first * size - start])
    if last * size < stop:
        move(run, last * size, stop, packed[last * size - start :])
    move(run, first * size, last * size, packed[first * size - start : last * size - start])


def _row_at(runs: Sequence[Run], place: int) -> int:
    """Where the row that holds this byte begins."""
    run = next(each for each in runs if each.start <= place < each.stop)
    return place - (place - run.start) % run.segment.row_bytes


def _kept(index: Index) -> list[tuple[int, int]]:
    """The ranges of rows that are not skipped."""
    kept = np.concatenate(([False], index >= 0, [False]))
    edges = np.flatnonzero(kept[1:] != kept[:-1])
    return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]
