"""Paged KV memory like Llama-3-8B's, and what of it is compared."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

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
    """Blocks of all layers, the bytes that they ought to hold, and room for a plain copy of them."""

    def __init__(self, blocks: int, memory: Memory, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        shape = (LAYERS, blocks, PAGE_BYTES)
        self.reference: Array = self._random.integers(0, 256, shape, np.uint8)
        self.blocks: Array = np.zeros(shape, np.uint8)
        self._copy: Array = np.zeros(shape, np.uint8)
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

    def memcpy(self) -> float:
        """Seconds of one plain copy of all blocks.

        Its target, like the arena of a store, was last touched a round ago: neither finds it in the cache.
        """
        started = time.perf_counter()
        np.copyto(self._copy, self.blocks)
        return time.perf_counter() - started

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


def _with_torch(memory: Memory) -> bool:
    return memory == "torch" or (memory == "auto" and importlib.util.find_spec("torch") is not None)


def _tensors(blocks: Array) -> list[Any]:
    """Over the same memory, as an engine has them: bfloat16, one tensor per layer."""
    import torch

    return [torch.from_numpy(layer).view(torch.bfloat16) for layer in blocks]
