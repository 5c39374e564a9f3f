"""Brings what a prompt lacks into memory, from all sources side by side."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvwire.server.fetch.bringing import Bringing
from kvwire.server.fetch.budget import Budget
from kvwire.server.fetch.source import Origin

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from kvwire.server.fetch.bringing import Waiter
    from kvwire.server.fetch.fills import Fills
    from kvwire.server.fetch.source import Source
    from kvwire.server.store import Space, StoredObject

log = logging.getLogger("kvwire.server")

MIB: Final = 1 << 20
BATCH_BYTES: Final = 256 * MIB
"""Reserved and fetched at once for one prompt."""
BATCH_OBJECTS: Final = 1024
"""The same in objects, so that reserving them does not keep others waiting."""
FLIGHT_BYTES: Final = 2048 * MIB
"""Reserved and fetched at once for all."""
FLIGHT_SHARE: Final = 0.25
"""Of the memory: what may be under way at once at most."""
STOP_S: Final = 2.0


@dataclass(slots=True)
class FetchCounters:
    """By origin; they only grow. Bytes are those of objects. `failed_objects` were found and did not come."""

    objects: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    failed_objects: dict[str, int] = field(default_factory=dict)
    faults: int = 0

    def add(self, counts: dict[str, int], origin: str, count: int) -> None:
        counts[origin] = counts.get(origin, 0) + count


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """`fetch_s`: how long the bytes of one batch may take, however long anybody waits for them."""

    batch_bytes: int = BATCH_BYTES
    flight_bytes: int = FLIGHT_BYTES
    fetch_s: float = 30.0
    grace_s: float = 1.0
    batch_objects: int = BATCH_OBJECTS

    @classmethod
    def of(cls, capacity: int, fetch_s: float) -> FetchLimits:
        flight = max(1, min(FLIGHT_BYTES, int(capacity * FLIGHT_SHARE)))
        return cls(min(BATCH_BYTES, flight), flight, fetch_s)


class Brought:
    """What came for one prompt, by chunk. It stays in memory until `release`.

    `late`: more was on its way when the time was up. `short_of_room`: more could have come.
    """

    def __init__(self, fills: Fills, bringing: Bringing, late: bool) -> None:
        self._fills = fills
        self._hold = bringing.hold
        self.origins: Mapping[int, Origin] = bringing.origins
        self.late = late
        self.short_of_room = bringing.short_of_room

    @property
    def l2_chunks(self) -> int:
        return sum(origin is Origin.L2 for origin in self.origins.values())

    @property
    def peer_chunks(self) -> int:
        return sum(origin is Origin.PEER for origin in self.origins.values())

    def release(self) -> None:
        """Idempotent."""
        self._fills.let_go(self._hold)


class Prefetcher:
    """Lives on the event loop. `view` opens the arena at an offset and a size."""

    def __init__(
        self,
        fills: Fills,
        view: Callable[[int, int], memoryview],
        limits: FetchLimits | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fills = fills
        self.view = view
        self.limits = limits or FetchLimits()
        self.now = now
        self.sources: list[Source] = []
        self.make_way: Callable[[Mapping[str, int], float], Awaitable[None]] | None = None
        self.counters = FetchCounters()
        self.budget = Budget(self.limits.flight_bytes)
        self.waiters: dict[StoredObject, list[Waiter]] = {}
        self._tasks: dict[asyncio.Task[None], asyncio.Future[None]] = {}
        self._stopping = False

    @property
    def active(self) -> bool:
        """Whether there is anything to bring from."""
        return bool(self.sources) and not self._stopping

    @property
    def under_way(self) -> int:
        """Prompts that something is brought for."""
        return len(self._tasks)

    def add(self, source: Source) -> None:
        """Tiers are asked before other servers, and else in the order of coming."""
        self.sources.append(source)
        self.sources.sort(key=lambda each: each.origin is Origin.PEER)

    async def bring(self, space: Space, keys: Sequence[bytes], tokens: bytes, until: float) -> Brought:
        """Bring what a longer boundary needs; returns when it is there, or cannot come, or at `until`.

        What is under way then goes on. `tokens` are those of the prompt, packed, if known. The caller
        releases what it gets. Raises nothing but CancelledError.
        """
        hold = self.fills.hold()
        bringing = Bringing(self, space, list(keys), tokens, hold, until)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self.active:
            answer.set_result(None)
        else:
            self._start(bringing, answer)
            try:
                await asyncio.wait({answer}, timeout=max(until - self.now(), 0))
            except BaseException:
                self.fills.let_go(hold)
                raise
            finally:
                bringing.over = True
        return Brought(self.fills, bringing, late=not answer.done())

    def tell(self, stored: StoredObject, origin: Origin | None) -> None:
        """Tell who waits for it that an object has come, or will not."""
        for waiter in list(self.waiters.get(stored, ())):
            waiter.resolved(stored, origin)

    def answer_now(self) -> None:
        """Nobody waits any more, and nothing new begins."""
        self._stopping = True
        for answer in self._tasks.values():
            if not answer.done():
                answer.set_result(None)

    async def close(self) -> None:
        """End everything. What a source does not let go of within two seconds stays taken."""
        self.answer_now()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            _, hanging = await asyncio.wait(tasks, timeout=STOP_S)
            if hanging:
                log.error("%d fetches did not end", len(hanging))

    def _start(self, bringing: Bringing, answer: asyncio.Future[None]) -> None:
        task = asyncio.get_running_loop().create_task(bringing.run(), name="kvwire-fetch")
        self._tasks[task] = answer
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        answer = self._tasks.pop(task)
        if not answer.done():
            answer.set_result(None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.counters.faults += 1
            log.error("a fetch failed: %r", error, exc_info=error)
