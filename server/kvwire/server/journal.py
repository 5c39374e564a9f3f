"""What happened to cached chunks, written down in numbered batches until everybody who reports them has them.

Batches are numbered from 1 without gaps. What is held is bounded: the oldest batches go, and a reader that
misses some is told how many (`lost`), so that whoever receives them pulls a snapshot.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class EventKind(IntEnum):
    """Numbers as in `kvwire.v1.CacheEventKind`."""

    STORE = 1
    ACCESS = 2
    DELETE = 3
    CLEAR = 4


class Entry(NamedTuple):
    """`tier` as in `kvwire.v1.StorageTier`. `tokens` are packed; `uses` belongs to ACCESS."""

    kind: EventKind
    tier: int
    backend: str
    key: bytes = b""
    size_bytes: int = 0
    tokens: bytes = b""
    parent: bytes = b""
    root: bytes = b""
    uses: int = 0


class Closed(NamedTuple):
    """A batch as it is sent. `lost`: batches right before it that this reader cannot have any more."""

    sequence: int
    payload: bytes
    lost: int


@dataclass(frozen=True, slots=True)
class JournalLimits:
    """A batch is closed at so many entries or bytes; closed ones are held up to `held_bytes`."""

    batch_events: int = 1000
    batch_bytes: int = 512 << 10
    held_bytes: int = 64 << 20


_ENTRY_BYTES = 160


class Journal:
    """Single-threaded, on an event loop. `encode` makes the bytes of a batch of a sequence and its entries.

    `on_open` is called when a batch gets its first entry: somebody has to call `close` soon.
    """

    def __init__(
        self,
        encode: Callable[[int, Sequence[Entry]], bytes],
        on_open: Callable[[], None],
        limits: JournalLimits | None = None,
    ) -> None:
        self.closed_sequence = 0
        self.dropped_batches = 0
        self.held_bytes = 0
        self._encode = encode
        self._on_open = on_open
        self._limits = limits or JournalLimits()
        self._open: list[Entry] = []
        self._open_bytes = 0
        self._accesses: dict[tuple[int, str, bytes], int] = {}
        self._held: deque[tuple[int, bytes]] = deque()
        self._readers: list[Reader] = []

    def note(self, entry: Entry) -> None:
        """Something that is no access."""
        self._begin()
        self._open.append(entry)
        self._open_bytes += _ENTRY_BYTES + len(entry.tokens)
        if len(self._open) >= self._limits.batch_events or self._open_bytes >= self._limits.batch_bytes:
            self.close()

    def note_accesses(self, tier: int, backend: str, keys: Sequence[bytes]) -> None:
        """Coalesced: one entry per chunk and batch."""
        if not keys:
            return
        self._begin()
        accesses = self._accesses
        for key in keys:
            place = (tier, backend, key)
            accesses[place] = accesses.get(place, 0) + 1
        if len(accesses) >= self._limits.batch_events:
            self.close()

    def close(self) -> None:
        """Close the open batches, if there is anything in them."""
        entries = self._open + [
            Entry(EventKind.ACCESS, tier, backend, key, uses=count)
            for (tier, backend, key), count in self._accesses.items()
        ]
        self._open, self._accesses, self._open_bytes = [], {}, 0
        step = self._limits.batch_events
        for start in range(0, len(entries), step):
            self._add(entries[start : start + step])

    def reader(self) -> Reader:
        """A new reader, which has everything up to now."""
        reader = Reader(self, self.closed_sequence)
        self._readers.append(reader)
        return reader

    def remove(self, reader: Reader) -> None:
        self._readers.remove(reader)
        self.forget_known()

    @property
    def held_batches(self) -> int:
        return len(self._held)

    def _begin(self) -> None:
        if not self._open and not self._accesses:
            self._on_open()

    def _add(self, entries: Sequence[Entry]) -> None:
        self.closed_sequence += 1
        payload = self._encode(self.closed_sequence, entries)
        self._held.append((self.closed_sequence, payload))
        self.held_bytes += len(payload)
        self.forget_known()
        while self.held_bytes > self._limits.held_bytes and self._held:
            self._forget_first()
            self.dropped_batches += 1
        for reader in self._readers:
            reader.news.set()

    def forget_known(self) -> None:
        """Let go of what every reader has."""
        known = min((reader.acknowledged for reader in self._readers), default=self.closed_sequence)
        while self._held and self._held[0][0] <= known:
            self._forget_first()

    def _forget_first(self) -> None:
        _, payload = self._held.popleft()
        self.held_bytes -= len(payload)

    def after(self, sequence: int, limit: int) -> list[Closed]:
        if not self._held or self._held[-1][0] <= sequence:
            return []
        first = self._held[0][0]
        start = max(0, sequence + 1 - first)
        lost = max(0, first - sequence - 1)
        found = []
        for index in range(start, min(start + limit, len(self._held))):
            number, payload = self._held[index]
            found.append(Closed(number, payload, lost))
            lost = 0
        return found


class Reader:
    """One who reports. `position`: the last batch taken; `acknowledged`: the last that arrived for good."""

    def __init__(self, journal: Journal, position: int) -> None:
        self.position = position
        self.acknowledged = position
        self.news = asyncio.Event()
        self._journal = journal

    def seek(self, sequence: int) -> None:
        """Go on after this batch, which the other side has. What is not closed yet is not believed."""
        self.acknowledge(sequence)
        self.position = self.acknowledged

    def rewind(self) -> None:
        """Take again what was not acknowledged."""
        self.position = self.acknowledged

    def take(self, limit: int) -> list[Closed]:
        """Up to `limit` batches, in order."""
        found = self._journal.after(self.position, limit)
        if found:
            self.position = found[-1].sequence
        return found

    async def wait(self, limit: int) -> list[Closed]:
        """`take`, as soon as there is something."""
        while True:
            self.news.clear()
            found = self.take(limit)
            if found:
                return found
            await self.news.wait()

    def acknowledge(self, sequence: int) -> None:
        """Everything up to this batch arrived."""
        self.acknowledged = max(self.acknowledged, min(sequence, self._journal.closed_sequence))
        self._journal.forget_known()

    def leave(self) -> None:
        """For good. What it has not taken yet is not kept for it any more."""
        self._journal.remove(self)
