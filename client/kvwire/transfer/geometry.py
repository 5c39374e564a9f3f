"""Where the pages of a KV group lie in memory, and in which order they make up an object.

An engine's pages are opaque: nothing ever looks inside one. A page is one row of memory, or several of equal
length where the engine has cut its blocks for a kernel. Rows of equal length that lie on a common grid form a
segment, in which a row is named by its number: gathering and scattering are then selections of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvwire.errors import LayoutUnsupported, RangeInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence

Index: TypeAlias = NDArray[np.int64]
Order: TypeAlias = Literal["layers", "blocks"]
SKIPPED: Final = -1


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's pages. `memory` is the allocation as uint8 (numpy, or a torch tensor on a device).

    Block i has one row of `row_bytes` at each of `offset + i * block_stride + part` for the parts in order.
    """

    memory: Any
    offset: int
    block_stride: int
    num_blocks: int
    row_bytes: int
    parts: tuple[int, ...] = (0,)

    @property
    def page_bytes(self) -> int:
        return self.row_bytes * len(self.parts)

    @property
    def end(self) -> int:
        return self.offset + (self.num_blocks - 1) * self.block_stride + max(self.parts) + self.row_bytes


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one length in one allocation. On the grid row r is at `origin + r * row_bytes`, else at r."""

    memory: Any
    origin: int
    row_bytes: int
    on_grid: bool


class Run(NamedTuple):
    """Consecutive rows of an object, all of one segment: its bytes [start, stop)."""

    segment: Segment
    rows: Index
    start: int
    stop: int
    has_skips: bool


class _Strip:
    """The rows of some layers in one segment: those of block i are `first + i * step`."""

    def __init__(self, segment: Segment, first: Index, step: int) -> None:
        self.segment: Final = segment
        self._first = first
        self._step = step
        self.key: Final = (step, first.tobytes())
        """Equal for strips that have the same row numbers, whatever their segments."""

    def rows(self, ids: Index, order: Order, *, has_skips: bool) -> Index:
        """Row numbers of the blocks, by layer or by block; -1 for those of a skipped block."""
        if order == "layers":
            blocks = ids[None, :, None]
            rows = self._first[:, None, :] + blocks * self._step
        else:
            blocks = ids[:, None]
            rows = self._first.reshape(1, -1) + blocks * self._step
        return (np.where(blocks < 0, SKIPPED, rows) if has_skips else rows).reshape(-1)


class Geometry:
    """The pages of one KV group. Raises LayoutUnsupported for layers that do not fit together."""

    def __init__(self, layers: Sequence[LayerPages], order: Order) -> None:
        if not layers or len({layer.num_blocks for layer in layers}) != 1:
            raise LayoutUnsupported(
                "A KV group needs layers, all with the same number of blocks.", problem="layers of a group"
            )
        for layer in layers:
            _check(layer)
        self.order: Final[Order] = order
        self.num_blocks: Final = layers[0].num_blocks
        self.block_bytes: Final = sum(layer.page_bytes for layer in layers)
        self._strips = _strips(layers, order)

    def check(self, ids: Index) -> bool:
        """Whether some of these blocks are skipped. Raises RangeInvalid for a block that does not exist."""
        if ids.size and (int(ids.max()) >= self.num_blocks or int(ids.min()) < SKIPPED):
            wrong = next(int(each) for each in ids if not SKIPPED <= each < self.num_blocks)
            raise RangeInvalid(
                f"Block {wrong} is outside the {self.num_blocks} blocks of the KV group.",
                first=wrong,
                count=1,
                limit=self.num_blocks,
            )
        return bool(ids.size) and int(ids.min()) < 0

    def runs(self, ids: Index, *, has_skips: bool) -> tuple[Run, ...]:
        """The rows of an object of these blocks, which have been checked."""
        if self.order == "layers" or len(self._strips) == 1:
            return self._chain([(strip, ids) for strip in self._strips], has_skips=has_skips)
        singles = [ids[i : i + 1] for i in range(len(ids))]
        return self._chain([(strip, each) for each in singles for strip in self._strips], has_skips=has_skips)

    def _chain(self, parts: list[tuple[_Strip, Index]], *, has_skips: bool) -> tuple[Run, ...]:
        # Layers that are allocated one by one mostly have the same row numbers.
        known: dict[tuple[int, tuple[int, bytes]], Index] = {}
        runs: list[Run] = []
        start = 0
        for strip, ids in parts:
            key = (id(ids), strip.key)
            index = known.get(key)
            if index is None:
                index = known[key] = strip.rows(ids, self.order, has_skips=has_skips)
            stop = start + len(index) * strip.segment.row_bytes
            runs.append(Run(strip.segment, index, start, stop, has_skips))
            start = stop
        return tuple(runs)


def _check(layer: LayerPages) -> None:
    if layer.num_blocks < 1 or layer.row_bytes < 1 or layer.offset + min(layer.parts) < 0:
        raise LayoutUnsupported("A layer has no blocks or no bytes in a page.", problem="empty layer")
    if layer.end > _nbytes(layer.memory):
        raise LayoutUnsupported(
            f"A layer's pages end at byte {layer.end} of an allocation of {_nbytes(layer.memory)} bytes.",
            problem="pages outside of memory",
        )


def _nbytes(memory: Any) -> int:
    return int(memory.nbytes)


def _strips(layers: Sequence[LayerPages], order: Order) -> list[_Strip]:
    """Layers that follow each other and share a segment, together."""
    groups: list[list[LayerPages]] = []
    for layer in layers:
        if groups and _fit(groups[-1][0], layer):
            groups[-1].append(layer)
        else:
            groups.append([layer])
    if order == "blocks" and len(groups) == 1 and (joined := _join(groups[0])):
        groups = [[joined]]
    return [_strip(group) for group in groups]


def _fit(one: LayerPages, other: LayerPages) -> bool:
    """Whether one selection of rows can serve both."""
    row = one.row_bytes
    same = one.memory is other.memory and (row, one.block_stride) == (other.row_bytes, other.block_stride)
    return same and len(one.parts) == len(other.parts) and _on_grid(one) and _on_grid(other) and (
        one.offset % row == other.offset % row
    )  # fmt: skip


def _on_grid(layer: LayerPages) -> bool:
    return layer.block_stride % layer.row_bytes == 0 and all(
        part % layer.row_bytes == 0 for part in layer.parts
    )


def _join(layers: list[LayerPages]) -> LayerPages | None:
    """The layers of a block as one row, where they lie side by side (block-outermost storage)."""
    first = layers[0]
    rows = [layer.offset + part for layer in layers for part in layer.parts]
    if any(place != rows[0] + i * first.row_bytes for i, place in enumerate(rows)):
        return None
    return LayerPages(
        first.memory, rows[0], first.block_stride, first.num_blocks, len(rows) * first.row_bytes
    )


def _strip(layers: list[LayerPages]) -> _Strip:
    layer = layers[0]
    places = np.array([[each.offset + part for part in each.parts] for each in layers], dtype=np.int64)
    if not _on_grid(layer):
        return _Strip(Segment(layer.memory, 0, layer.row_bytes, on_grid=False), places, layer.block_stride)
    origin = layer.offset % layer.row_bytes
    segment = Segment(layer.memory, origin, layer.row_bytes, on_grid=True)
    return _Strip(segment, (places - origin) // layer.row_bytes, layer.block_stride // layer.row_bytes)
