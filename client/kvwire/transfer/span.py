"""Host memory as one array of rows, wherever the layers of a KV group were allocated.

numpy writes chosen rows of an array at the speed of memcpy, and lets other threads of the interpreter run
meanwhile, but only when there are more than 500 of them. So all layers are seen as one array, from the first
of their bytes to the last, whose elements lie `step` bytes apart and overlap; and a row is cut into several
elements. Only bytes of the layers are ever touched.
"""

from __future__ import annotations

import ctypes
from functools import reduce
from math import gcd
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.transfer.base import ByteArray
    from kvwire.transfer.geometry import Index, LayerPages, Order

LARGE_ROW_BYTES: Final = 16 << 10
"""Rows of this size and more are written by span; smaller ones are many, or are not worth it."""
_ELEMENT_BYTES: Final = 8 << 10
_MIN_STEP: Final = 512


class RowSpan:
    """The rows of the layers of one group, all of one length. Made by `of`."""

    def __init__(self, places: Index, layer: LayerPages, element: int, step: int) -> None:
        """`places` are the addresses of each layer's parts of block 0. The caller keeps the memory."""
        low = int(places.min())
        size = int(places.max()) + (layer.num_blocks - 1) * layer.block_stride + layer.row_bytes - low
        self.row_bytes: Final = layer.row_bytes
        self._first = places - low
        self._stride = layer.block_stride
        self._step = step
        self._cut = np.arange(0, layer.row_bytes, element, dtype=np.int64) // step
        self._element = np.dtype((np.void, element))
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(low))
        first = memory[:element].view(self._element)
        self._elements = np.lib.stride_tricks.as_strided(first, ((size - element) // step + 1,), (step,))

    @classmethod
    def of(cls, layers: Sequence[LayerPages]) -> RowSpan | None:
        """None for layers that are not alike, or whose rows are small."""
        one = layers[0]
        alike = {(layer.row_bytes, layer.block_stride, len(layer.parts)) for layer in layers}
        if len(alike) > 1 or one.row_bytes < LARGE_ROW_BYTES:
            return None
        places = np.array([_addresses(layer) for layer in layers], dtype=np.int64)
        element = _element(one.row_bytes)
        step = reduce(gcd, (places - places[0, 0]).reshape(-1).tolist(), gcd(element, one.block_stride))
        return cls(places, one, element, step) if step >= _MIN_STEP else None

    def rows(self, ids: Index, order: Order) -> Index:
        """Where the rows of these blocks begin, in the order of an object."""
        if order == "layers":
            places = self._first[:, None, :] + ids[None, :, None] * self._stride
        else:
            places = self._first.reshape(1, -1) + ids[:, None] * self._stride
        return places.reshape(-1) // self._step

    def scatter(self, rows: Index, data: ByteArray) -> None:
        """Packed `data` into these rows."""
        index = (rows[:, None] + self._cut).reshape(-1)
        self._elements[index] = data.view(self._element)


def _addresses(layer: LayerPages) -> list[int]:
    start = int(layer.memory.ctypes.data) + layer.offset
    return [start + part for part in layer.parts]


def _element(row_bytes: int) -> int:
    """The largest equal part of a row that is not above `_ELEMENT_BYTES`; the row itself if that is tiny."""
    parts = -(-row_bytes // _ELEMENT_BYTES)
    while row_bytes % parts:
        parts += 1
    element = row_bytes // parts
    return element if element >= _ELEMENT_BYTES // 4 else row_bytes
