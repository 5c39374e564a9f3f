"""A lower tier as a source of what the memory lacks."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from kvwire.errors import ChecksumMismatch, TransferFailed
from kvwire.server.fetch.source import Origin
from kvwire.server.tiers.format import layout_name
from kvwire.server.tiers.tier import ReadFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.errors import KvwireError
    from kvwire.server.fetch.source import Target, Wanted
    from kvwire.server.tiers.entries import TierChunk
    from kvwire.server.tiers.tier import Tier

    Done = Callable[[Target, bytes, KvwireError | None], None]

log = logging.getLogger("kvwire.server")

READS: Final = 8
"""Objects of one prompt that are read at a time."""


class TierSource:
    """`stamps(count)` gives new stamps for a chain; `used(keys)` hears which chunks a prompt has found."""

    origin = Origin.L2

    def __init__(
        self, tier: Tier, stamps: Callable[[int], Sequence[int]], used: Callable[[Sequence[bytes]], None]
    ) -> None:
        self.name = tier.name
        self._tier = tier
        self._stamps = stamps
        self._used = used

    async def find(self, wanted: Wanted, until: float) -> FoundInTier | None:
        """What the index has. It is protected from eviction until `release`."""
        if not self._tier.ready:
            return None
        index = self._tier.index
        shards = wanted.space.shards
        layout = layout_name(shards.layout, shards.chunk_size)
        chunks: list[TierChunk | None] = []
        masks: list[int] = []
        for key, mask in zip(wanted.keys, wanted.masks, strict=True):
            chunk = index.get(key)
            more = chunk.mask & ~mask if chunk is not None and chunk.space.layout == layout else 0
            chunks.append(chunk if more else None)
            masks.append(more)
        held = [chunk for chunk in chunks if chunk is not None]
        if not held:
            return None
        index.touch(wanted.keys, self._stamps(len(wanted.keys)))
        self._used([chunk.key for chunk in held if chunk.announced])
        return FoundInTier(self._tier, chunks, masks)


class FoundInTier:
    def __init__(self, tier: Tier, chunks: Sequence[TierChunk | None], masks: Sequence[int]) -> None:
        self.masks = masks
        self._tier = tier
        self._chunks = chunks
        self._held = [chunk for chunk in chunks if chunk is not None]
        for chunk in self._held:
            tier.index.pin(chunk)

    async def fetch(self, targets: Sequence[Target], done: Done, until: float) -> None:
        """A few at a time, in their order."""
        left = list(reversed(targets))

        async def reader() -> None:
            while left:
                target = left.pop()
                digest, error = b"", None
                try:
                    digest = await self._read(target, until)
                except Exception as failed:  # noqa: BLE001 - told to whoever waits for the object, and logged
                    error = self._error(target, failed)
                done(target, digest, error)

        async with asyncio.TaskGroup() as readers:
            for _ in range(min(READS, len(targets))):
                readers.create_task(reader())

    async def release(self) -> None:
        held, self._held = self._held, []
        for chunk in held:
            self._tier.index.unpin(chunk)

    async def _read(self, target: Target, until: float) -> bytes:
        chunk = self._chunks[target.index]
        if chunk is None or not chunk.mask >> target.shard & 1:
            raise LookupError("not there (any more)")
        return await self._tier.read(chunk, target.shard, target.view, until)

    def _error(self, target: Target, failed: Exception) -> KvwireError:
        text = (
            f"Shard {target.shard} of chunk {target.index} did not come from L2 {self._tier.name}: {failed}."
        )
        if isinstance(failed, ReadFailed) and failed.damaged:
            return ChecksumMismatch(text, chunk_index=target.index, path=self._tier.name)
        return TransferFailed(text, path=self._tier.name, cause=str(failed))
