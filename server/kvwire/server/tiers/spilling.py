"""The policy "evict": what is about to leave the memory is written to a lower tier first."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from kvwire.server.store import ObjectState
from kvwire.server.store.upcoming import going, needs_room, upcoming, upcoming_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvwire.server.sealing import Sealer
    from kvwire.server.store import Chunk, L1Store, TenantUse
    from kvwire.server.tiers.writer import Saving

AT_ONCE: Final = 8
"""Chunks that are written at a time. They cannot be evicted meanwhile."""
PARTS: Final = 8
"""Of the memory: no more than one such part is written at a time."""
LOOKED_AT: Final = 2048
"""Chunks that are looked at without letting others run."""
EVICTED: Final = 256
PATIENCE_S: Final = 1.0
"""Below the watermark there is time to wait for a pause between transfers, above it there is none."""


class Spiller:
    """Begins as far below the watermark as there is memory above it, so that room is mostly there when it is
    asked for. Evicts down to the watermark what it has written, or could not write.
    """

    def __init__(self, savings: Sequence[Saving], store: L1Store, sealer: Sealer, watermark: float) -> None:
        self._savings = savings
        self._store = store
        self._sealer = sealer
        capacity = store.allocator.capacity
        self._high = int(capacity * watermark)
        self._low = max(0, 2 * self._high - capacity)
        self._part = max(1, capacity // PARTS)
        self._tasks: dict[Chunk, asyncio.Task[None]] = {}
        self._seen: WeakKeyDictionary[TenantUse, tuple[int, int]] = WeakKeyDictionary()
        self._news = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Objects that are being written."""
        return sum(sum(stored is not None for stored in chunk.shards) for chunk in self._tasks)

    def poke(self) -> None:
        """There may be something to do."""
        if self._store.allocator.used > self._low or self._pressed():
            self._news.set()

    async def run(self) -> None:
        """Write and evict for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            tried: set[Chunk] = set()
            await self._probe(tried)
            while chunks := self._unsaved_ahead(tried):
                for batch in self._batches(chunks, tried):
                    calm = self._store.allocator.used <= self._high
                    await self._sealer.quiet(time.monotonic() + PATIENCE_S * calm)
                    await _ended(self._begin(batch))
                    self._evict(tried)
            self._evict(tried)

    async def make_way(self, need: Mapping[str, int], until: float) -> None:
        """Write what would go for so many bytes (by tenant), as far as it goes until then (monotonic)."""
        tried: set[Chunk] = set()
        begun: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout_at(until):
                if needs_room(self._store, need):
                    await _ended(list(self._tasks.values()))
                while chunks := self._unsaved(going(self._store, need, LOOKED_AT), tried):
                    for batch in self._batches(chunks, tried):
                        begun = self._begin(batch)
                        await _ended(begun)
        except TimeoutError:
            # What is being written cannot be evicted: better lost below than no room above.
            await _cancelled(begun)
            allocator = self._store.allocator
            if sum(need.values()) > allocator.free_bytes + self._store.evictable_bytes:
                await _cancelled(list(self._tasks.values()))

    async def save_all(self, until: float) -> None:
        """At the end of a run: the latest prompts first, and their heads first."""
        chunks = sorted(self._store.chunks(), key=lambda chunk: -chunk.stamp)
        for batch in self._batches([chunk for chunk in chunks if not self._saved(chunk)], set()):
            left = until - time.monotonic()
            if left <= 0:
                return
            await asyncio.wait(self._begin(batch), timeout=left)

    def count_lost(self, chunk: Chunk) -> None:
        """A chunk is evicted: what was not written is skipped."""
        for saving in self._savings:
            tier = saving.tier
            lost = [each for each in chunk.shards if each is not None and not tier.has(chunk, each.shard)]
            tier.counters.skipped_objects += len(lost)

    async def close(self) -> None:
        await _cancelled(list(self._tasks.values()))

    def _evict(self, tried: set[Chunk]) -> None:
        """Not while something would go that came under pressure a moment ago: its turn is next."""
        store = self._store
        if not self._unsaved(upcoming(store, store.allocator.used - self._high, EVICTED), tried):
            store.evict_to(self._high, EVICTED)

    async def _probe(self, tried: set[Chunk]) -> None:
        """One chunk shows whether a tier that did not work does again."""
        if all(saving.works for saving in self._savings):
            return
        for chunk in upcoming(self._store, 1, 1):
            tried.add(chunk)
            await _ended(self._begin([chunk]))

    def _unsaved_ahead(self, tried: set[Chunk]) -> list[Chunk]:
        """Of what goes next when the memory, or a tenant's part of it, has filled up."""
        chunks = self._unsaved(
            upcoming(self._store, self._store.allocator.used - self._low, LOOKED_AT), tried
        )
        for use in self._pressed():
            own = upcoming_of(self._store, use, use.used - self._low_of(use), LOOKED_AT)
            unsaved = self._unsaved(own, tried)
            if unsaved:
                chunks += unsaved
            else:
                self._seen[use] = (use.arrivals, use.limit)
        return chunks

    def _pressed(self) -> list[TenantUse]:
        """Tenants above their quotas, and those close to them of whom something new is to be written."""
        return [
            use
            for use in self._store.tenants.limited()
            if use.used > self._low_of(use)
            and (use.excess() > 0 or self._seen.get(use) != (use.arrivals, use.limit))
        ]

    def _low_of(self, use: TenantUse) -> int:
        return use.limit * self._low // self._store.allocator.capacity

    def _unsaved(self, chunks: Sequence[Chunk], tried: set[Chunk]) -> list[Chunk]:
        """Those that are not in every tier that works."""
        return [chunk for chunk in chunks if chunk not in tried and not self._saved(chunk)]

    def _saved(self, chunk: Chunk) -> bool:
        return all(
            stored is None or not saving.works or saving.tier.has(chunk, stored.shard)
            for saving in self._savings
            for stored in chunk.shards
        )

    def _batches(self, chunks: Sequence[Chunk], tried: set[Chunk]) -> Iterator[list[Chunk]]:
        """A few at a time of those that still could go; notes what was tried."""
        batch: list[Chunk] = []
        size = 0
        for chunk in chunks:
            if chunk.size and chunk not in self._tasks:
                batch.append(chunk)
                size += chunk.size
                tried.add(chunk)
            if len(batch) == AT_ONCE or size >= self._part:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _begin(self, chunks: Sequence[Chunk]) -> list[asyncio.Task[None]]:
        # What was evicted meanwhile has nothing left to be written.
        return [self._tasks.get(chunk) or self._start(chunk) for chunk in chunks if chunk.size]

    def _start(self, chunk: Chunk) -> asyncio.Task[None]:
        task = self._tasks[chunk] = asyncio.get_running_loop().create_task(self._save(chunk))
        task.add_done_callback(lambda _: self._tasks.pop(chunk, None))
        self._store.pin((chunk,))
        task.add_done_callback(lambda _: self._store.unpin((chunk,)))
        return task

    async def _save(self, chunk: Chunk) -> None:
        resident = [each for each in chunk.shards if each and each.state is ObjectState.RESIDENT]
        await self._sealer.seal([self._store.ref(each) for each in resident if not each.checksum])
        for saving in self._savings:
            for stored in resident:
                if not saving.tier.has(chunk, stored.shard):
                    await saving.save(stored)


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks)


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
