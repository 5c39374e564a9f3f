"""Who watches members and events. Nobody waits for a watcher: what it does not take is merged or left out."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from kvwire.coordinator import convert
from kvwire.coordinator.intake import kind_counts
from kvwire.errors import Draining, Overloaded
from kvwire.v1 import coordinator_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvwire.coordinator.intake import Taken
    from kvwire.coordinator.members import Changes

MAX_QUEUED: Final = 1000
"""Batches that wait for one watcher of events."""
STUCK_S: Final = 60.0
"""A watcher that takes nothing for so long is dropped: its place is wanted."""

W = TypeVar("W", bound="_Watcher")


@dataclass(eq=False)
class _Watcher:
    news: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[Any] | None = field(default_factory=asyncio.current_task)
    waiting_since: float | None = None

    def wake(self) -> None:
        self.news.set()
        if self.waiting_since is None:
            self.waiting_since = time.monotonic()

    def moves(self) -> None:
        """It has taken what it was sent."""
        self.waiting_since = None


@dataclass(eq=False)
class _ServerWatcher(_Watcher):
    """`pending`: server ids in the order of their last change."""

    pending: dict[str, None] = field(default_factory=dict)


@dataclass(eq=False)
class _EventWatcher(_Watcher):
    server_id: str = ""
    queue: deque[Taken] = field(default_factory=deque)
    missed: int = 0
    """Before the first one of the queue."""


class _Watchers(Generic[W]):
    def __init__(self, limit: int) -> None:
        self._watchers: list[W] = []
        self._limit = limit
        self._closed = False

    def __len__(self) -> int:
        return len(self._watchers)

    def close(self) -> None:
        """End all streams: the program stops."""
        self._closed = True
        for watcher in self._watchers:
            watcher.news.set()

    def drop_stuck(self, now: float) -> None:
        """End the streams of those who take nothing."""
        for watcher in list(self._watchers):
            since = watcher.waiting_since
            if since is not None and now - since > STUCK_S and watcher.task is not None:
                watcher.task.cancel()

    def _enter(self, watcher: W) -> W:
        if len(self._watchers) >= self._limit:
            raise Overloaded(
                f"{self._limit} watchers are connected, and more are not allowed (--max-watchers).",
                in_flight=len(self._watchers),
                allowed=self._limit,
            )
        self._watchers.append(watcher)
        return watcher

    async def _next(self, watcher: W) -> None:
        if not self._closed:
            await watcher.news.wait()
        if self._closed:
            raise Draining("The coordinator is shutting down: watch again when it is back.")
        watcher.news.clear()
        watcher.moves()


class ServerWatchers(_Watchers[_ServerWatcher]):
    """`member` describes a member as it is now, or returns None."""

    def __init__(self, member: Callable[[str], pb.Member | None], limit: int) -> None:
        super().__init__(limit)
        self._member = member

    def tell(self, changes: Changes) -> None:
        changed = [*changes.left, *changes.changed]
        if not changed:
            return
        for watcher in self._watchers:
            for server_id in changed:
                watcher.pending.pop(server_id, None)
                watcher.pending[server_id] = None
            watcher.wake()

    async def follow(self, known: Callable[[], list[pb.Member]]) -> AsyncIterator[pb.WatchServersResponse]:
        """`known` first; raises Overloaded, Draining."""
        watcher = self._enter(_ServerWatcher())
        try:
            for member in known():
                yield pb.WatchServersResponse(joined=member)
            yield pb.WatchServersResponse(synced=True)
            while True:
                await self._next(watcher)
                while watcher.pending:
                    server_id = next(iter(watcher.pending))
                    del watcher.pending[server_id]
                    watcher.moves()
                    now = self._member(server_id)
                    if now is None:
                        yield pb.WatchServersResponse(left=server_id)
                    else:
                        yield pb.WatchServersResponse(joined=now)
        finally:
            self._watchers.remove(watcher)


class EventWatchers(_Watchers[_EventWatcher]):
    def tell(self, make: Callable[[], Taken]) -> None:
        if not self._watchers:
            return
        taken = make()
        for watcher in self._watchers:
            if watcher.server_id in {"", taken.server_id}:
                self._queue(watcher, taken)

    async def follow(self, server_id: str) -> AsyncIterator[pb.WatchEventsResponse]:
        """Raises Overloaded, Draining."""
        watcher = self._enter(_EventWatcher(server_id=server_id))
        try:
            while True:
                await self._next(watcher)
                while watcher.queue:
                    watcher.moves()
                    missed, watcher.missed = watcher.missed, 0
                    yield _event(watcher.queue.popleft(), missed)
        finally:
            self._watchers.remove(watcher)

    @staticmethod
    def _queue(watcher: _EventWatcher, taken: Taken) -> None:
        if len(watcher.queue) == MAX_QUEUED:
            watcher.queue.popleft()
            watcher.missed += 1
        watcher.queue.append(taken)
        watcher.wake()


def _event(taken: Taken, missed: int) -> pb.WatchEventsResponse:
    return pb.WatchEventsResponse(
        server_id=taken.server_id,
        sequence=taken.sequence,
        admission=convert.ADMISSIONS[taken.admission],
        lost=taken.lost,
        lag=None if taken.lag is None else convert.duration(taken.lag),
        source=taken.source,
        missed=missed,
        **kind_counts(taken.kinds),
    )
