"""Paged KV memory like Llama-3-8B's, and what of it is compared."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from kvwire.transfer.shm import SharedArena

if TYPE_CHECKING:
    from collections.abc import Sequence

LAYERS: Final = 32
BLOCK_TOKENS: Final = 16
PAGE_BYTES: Final = 64 << 10
"""One block of one layer: 16 tokens x K and V x 8 heads x 128 values of 2 bytes."""
BLOCK_BYTES: Final = LAYERS * PAGE_BYTES

Memory = Literal["auto", "torch", "numpy"]
Array = np.ndarray[Any, np.dtype[np.uint8]]


class PagedKv:
    """Blocks of all layers, and the bytes that they ought to hold."""

    def __init__(self, blocks: int, memory: Memory, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        shape = (LAYERS, blocks, PAGE_BYTES)
        self.reference: Array = self._random.integers(0, 256, shape, np.uint8)
        self.blocks: Array = np.zeros(shape, np.uint8)
        self.layers = _tensors(self.blocks) if _with_torch(memory) else list(self.blocks)

    @property
    def size_bytes(self) -> int:
        return int(self.blocks.nbytes)

    @property
    def num_tokens(self) -> int:
        return int(self.blocks.shape[1]) * BLOCK_TOKENS

    def shuffled(self) -> list[int]:
        """A block table: every block, in no order."""
        table: list[int] = self._random.permutation(self.blocks.shape[1]).tolist()
        return table

    def fresh_tokens(self) -> bytes:
        """A prompt that nobody has stored."""
        return self._random.integers(0, 128_000, self.num_tokens, np.uint32).tobytes()

    def load(self) -> None:
        """Give the blocks their bytes."""
        np.copyto(self.blocks, self.reference)

    def bytes(self) -> memoryview:
        """All of the reference, as it would be sent."""
        return self.reference.data.cast("B")

    def wipe(self) -> None:
        self.blocks.fill(0)

    def is_moved(self, stored: Sequence[int], retrieved: Sequence[int]) -> bool:
        """Whether block `retrieved[i]` holds, in every layer, every byte of what `stored[i]` held."""
        return all(
            np.array_equal(self.blocks[:, into].view(np.uint64), self.reference[:, out].view(np.uint64))
            for out, into in zip(stored, retrieved, strict=True)
        )


class PlainCopies:
    """memcpy of the same bytes between the same kinds of memory: the blocks', and shared memory's.

    Both were last touched a round ago, as the arena of a store was: no copy finds them in the cache.
    """

    def __init__(self, kv: PagedKv) -> None:
        self._blocks = kv.blocks.reshape(-1)
        self._arena = SharedArena.create(kv.size_bytes, "kvwire-bench-")
        self._arena.ensure(self._arena.size)
        self._shared: Array = self._arena.array(self._arena.base, kv.size_bytes)
        np.copyto(self._shared, self._blocks)

    def into_shared(self) -> float:
        """Seconds of one copy, as a store makes it."""
        return _seconds(self._shared, self._blocks)

    def out_of_shared(self) -> float:
        """Seconds of one copy, as a retrieve makes it. The blocks have these bytes already."""
        return _seconds(self._blocks, self._shared)

    def close(self) -> None:
        del self._shared
        self._arena.unlink()
        self._arena.close()


def _seconds(into: Array, out: Array) -> float:
    started = time.perf_counter()
    np.copyto(into, out)
    return time.perf_counter() - started


def _with_torch(memory: Memory) -> bool:
    return memory == "torch" or (memory == "auto" and importlib.util.find_spec("torch") is not None)


def _tensors(blocks: Array) -> list[Any]:
    """Over the same memory, as an engine has them: bfloat16, one tensor per layer."""
    import torch

    return [torch.from_numpy(layer).view(torch.bfloat16) for layer in blocks]
