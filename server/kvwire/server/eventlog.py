"""A bounded log of what was stored and removed, and its readers."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvwire.server.store import Chunk, RemovedChunk, StoredChunk


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """`kind` is "store", "delete" or "clear". `namespace_id` is the base namespace's root, to filter by."""

    sequence: int
    kind: str
    key: bytes
    size_bytes: int
    parent: bytes
    root: bytes
    namespace_id: bytes


@dataclass(frozen=True, slots=True)
class EventPage:
    """`lost` says that events between the last page and this one were dropped."""

    events: tuple[LoggedEvent, ...]
    sequence: int
    lost: bool


class EventLog:
    """Sequences start at 1 and have no gaps. The oldest events go when `capacity` is reached."""

    def __init__(self, capacity: int = 32768) -> None:
        self._events: deque[LoggedEvent] = deque(maxlen=capacity)
        self._sequence = 0
        self._news = asyncio.Event()
        self._closed = False

    @property
    def sequence(self) -> int:
        return self._sequence

    def append(
        self,
        kind: str,
        key: bytes = b"",
        *,
        size_bytes: int = 0,
        parent: bytes = b"",
        root: bytes = b"",
        namespace_id: bytes = b"",
    ) -> None:
        self._sequence += 1
        self._events.append(LoggedEvent(self._sequence, kind, key, size_bytes, parent, root, namespace_id))
        self._news.set()

    def after(self, sequence: int, limit: int) -> EventPage:
        """Up to `limit` events after `sequence`."""
        if sequence > self._sequence:
            return EventPage((), self._sequence, lost=True)
        missing = self._sequence - sequence
        held = len(self._events)
        lost = missing > held
        start = 0 if lost else held - missing
        page = tuple(self._events[index] for index in range(start, min(start + limit, held)))
        return EventPage(page, page[-1].sequence if page else self._sequence, lost)

    def close(self) -> None:
        """End its readers."""
        self._closed = True
        self._news.set()

    async def follow(self, sequence: int, idle: float, limit: int = 1000) -> AsyncIterator[EventPage]:
        """Pages from after `sequence` on, until `close`.

        The first comes at once, so that a reader knows where it stands; an empty one after `idle` seconds
        without news.
        """
        page = self.after(sequence, limit)
        position = page.sequence
        yield page
        while not self._closed:
            page = self.after(position, limit)
            if page.events or page.lost:
                position = page.sequence
                yield page
                continue
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), idle)
            except TimeoutError:
                yield EventPage((), position, lost=False)


class StoreEvents:
    """Writes what the store reports into the log."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def on_stored(self, event: StoredChunk) -> None:
        self._log.append(
            "store",
            event.key,
            size_bytes=event.size,
            parent=event.parent_key,
            root=event.root,
            namespace_id=event.base_root,
        )

    def on_removed(self, event: RemovedChunk) -> None:
        self._log.append("delete", event.key, root=event.root, namespace_id=event.base_root)

    def on_cleared(self) -> None:
        self._log.append("clear")

    def on_used(self, chunks: Sequence[Chunk]) -> None: ...
