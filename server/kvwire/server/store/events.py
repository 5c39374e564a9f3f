from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.server.store.objects import Chunk


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk became complete. `parent_key` is empty for a head and when unknown, `tokens` when unknown."""

    key: bytes
    parent_key: bytes
    root: bytes
    base_root: bytes
    size: int
    tokens: bytes = b""


@dataclass(frozen=True, slots=True)
class RemovedChunk:
    """A complete chunk is gone, or not complete any more. `evicted`: others needed the memory."""

    key: bytes
    root: bytes
    base_root: bytes
    size: int
    evicted: bool


class StoreListener(Protocol):
    """Told about complete chunks only, synchronously: it must be fast and must not call back.

    `on_used`: a lookup has found these chunks, of which some may not be complete.
    """

    def on_stored(self, event: StoredChunk) -> None: ...

    def on_removed(self, event: RemovedChunk) -> None: ...

    def on_cleared(self) -> None: ...

    def on_used(self, chunks: Sequence[Chunk]) -> None: ...


class Listeners:
    """Several as one, told in order."""

    def __init__(self, *listeners: StoreListener) -> None:
        self._listeners = listeners

    def on_stored(self, event: StoredChunk) -> None:
        for each in self._listeners:
            each.on_stored(event)

    def on_removed(self, event: RemovedChunk) -> None:
        for each in self._listeners:
            each.on_removed(event)

    def on_cleared(self) -> None:
        for each in self._listeners:
            each.on_cleared()

    def on_used(self, chunks: Sequence[Chunk]) -> None:
        for each in self._listeners:
            each.on_used(chunks)
