"""An engine's KV in whatever holds it: torch tensors or numpy arrays, the first dimension counting blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvwire.errors import LayoutUnsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.transfer.pages import KvGroupPages


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The pages of all KV groups, and what a fingerprint has to know of them."""

    groups: tuple[KvGroupPages, ...]
    dtype: str
    device: str

    @property
    def num_blocks(self) -> int:
        return min(group.num_blocks for group in self.groups)


def kv_memory(tensors: Sequence[Sequence[Any]], *, threads: int = 0) -> KvMemory:
    """For each KV group the tensors or arrays of its layers, of shape (blocks, ...).

    An object of a group is the chosen blocks of the first tensor, then those of the second, and so on.
    Raises LayoutUnsupported for what is not made of whole blocks.
    """
    flat = [each for group in tensors for each in group]
    if not flat or not all(tensors):
        raise LayoutUnsupported("Every KV group needs the tensors of its layers.", problem="no tensors")
    first = flat[0]
    if all(isinstance(each, np.ndarray) for each in flat):
        return KvMemory(_array_groups(tensors, threads), str(first.dtype), "cpu")
    if any(isinstance(each, np.ndarray) for each in flat):
        raise LayoutUnsupported("KV in tensors and in arrays cannot be mixed.", problem="mixed")
    dtype = str(first.dtype).removeprefix("torch.")
    return KvMemory(_tensor_groups(tensors, threads), dtype, str(first.device.type))


def _array_groups(tensors: Sequence[Sequence[Any]], threads: int) -> tuple[KvGroupPages, ...]:
    from kvwire.transfer.pages import pages_from_arrays

    return tuple(pages_from_arrays([_rows(array) for array in group], threads=threads) for group in tensors)


def _rows(array: Any) -> Any:
    """(blocks, page bytes) over the same memory."""
    inner = array[:1]
    if array.ndim < 2 or not inner.flags.c_contiguous or not array.flags.writeable:
        raise LayoutUnsupported(
            f"An array of shape {array.shape} is not made of writable blocks that each lie together.",
            problem="array layout",
        )
    return array.reshape(array.shape[0], -1).view(np.uint8)


def _tensor_groups(tensors: Sequence[Sequence[Any]], threads: int) -> tuple[KvGroupPages, ...]:
    from kvwire.transfer.pages import pages_from_torch

    pages: list[KvGroupPages] = []
    for group in tensors:
        named = {str(index): each for index, each in enumerate(group)}
        pages += pages_from_torch(named, [list(named)], group[0].shape[0], threads=threads)
    return tuple(pages)
