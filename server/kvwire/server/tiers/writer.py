"""What is written to a lower tier because it was stored in memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvwire.server.store import ObjectState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvwire.server.store import L1Store, StoredObject
    from kvwire.server.tiers.tier import Tier

log = logging.getLogger("kvwire.server")

MAX_QUEUED: Final = 16384
"""Objects that wait for one tier. They are not held meanwhile: what is evicted first is skipped."""
WRITES: Final = {"file": 2}
MORE_WRITES: Final = 6
"""Objects that are written at a time: a folder is fast, others are far away."""
PATIENCE_S: Final = 2.0
"""How long an object waits for a pause between transfers."""
BREAK_S: Final = 0.2
"""How long to wait until a write has been broken off."""
RUSH_S: Final = 10.0
"""No object waits so long after one was evicted before its turn."""


class Saving:
    """Writes one object out of the memory tier, which holds it meanwhile."""

    def __init__(self, tier: Tier, store: L1Store, view: Callable[[int, int], memoryview]) -> None:
        self.tier = tier
        self.store = store
        self._view = view

    @property
    def works(self) -> bool:
        """Whether an attempt is likely to help."""
        return self.tier.ready and self.tier.problems.writable

    async def save(self, stored: StoredObject) -> bool:
        """False: it is not in the tier; it is counted why. Raises nothing but CancelledError."""
        tier = self.tier
        if stored.state is not ObjectState.RESIDENT:
            tier.counters.skipped_objects += 1
            return False
        chunk = stored.chunk
        self.store.pin((chunk,))
        try:
            tier.index.follow_up(chunk)
            return await tier.write(stored, self._view(stored.offset, stored.size))
        except Exception:
            log.exception("L2 %s: an object was not written", tier.name)
            tier.counters.failed_writes += 1
            return False
        finally:
            self.store.unpin((chunk,))


class Writer:
    """The policy "all": what is in memory and has its checksum, in the order in which it got it."""

    def __init__(self, saving: Saving, quiet: Callable[[float], Awaitable[None]]) -> None:
        self.tier = saving.tier
        self.tier.on_ready = self.fill
        self._saving = saving
        self._quiet = quiet
        # What waits, and since when.
        self._queue: OrderedDict[StoredObject, float] = OrderedDict()
        self._news = asyncio.Semaphore(0)
        self.busy = 0
        self._hurry = False
        self._missed = False
        self._rush_until = 0.0
        self._running: set[asyncio.Task[bool]] = set()

    @property
    def waiting(self) -> int:
        """Objects that are not written yet."""
        return len(self._queue) + self.busy

    def offer(self, stored: StoredObject) -> None:
        """It will be written, or skipped and counted."""
        known = stored in self._queue or self.tier.has(stored.chunk, stored.shard)
        if known or not self.tier.ready:
            return
        if len(self._queue) >= MAX_QUEUED:
            self.tier.counters.skipped_objects += 1
            return
        self._queue[stored] = time.monotonic()
        self._news.release()

    def fill(self) -> None:
        """Offer what is in memory and not in the tier, which has not taken it while it did not work."""
        self._missed = False
        for chunk in self._saving.store.chunks():
            for stored in chunk.shards:
                if stored is not None and stored.checksum:
                    self.offer(stored)

    def hurry(self) -> None:
        """Do not wait for pauses any more."""
        self._hurry = True

    async def run(self) -> None:
        """Write for ever."""
        count = WRITES.get(self.tier.settings.place.scheme, MORE_WRITES)
        async with asyncio.TaskGroup() as workers:
            for _ in range(count):
                workers.create_task(self._work())

    async def _work(self) -> None:
        while True:
            await self._news.acquire()
            stored, since = self._queue.popitem(last=False)
            self.busy += 1
            try:
                if not self._hurry and time.monotonic() >= self._rush_until:
                    await self._quiet(since + PATIENCE_S)
                await self._save(stored)
            finally:
                self.busy -= 1

    async def give_way(self) -> None:
        """Break off what is being written: others need the memory that it holds."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=BREAK_S)

    async def _save(self, stored: StoredObject) -> None:
        if stored.state is not ObjectState.RESIDENT:
            self._rush_until = time.monotonic() + RUSH_S
        task = asyncio.get_running_loop().create_task(self._saving.save(stored))
        self._running.add(task)
        try:
            await asyncio.wait((task,))
        finally:
            self._running.discard(task)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if task.cancelled():
            self._missed = True
            self.tier.counters.skipped_objects += 1
        elif not task.result():
            self._missed = self._missed or not self._saving.works
        elif self._missed and not self._queue:
            self.fill()
