from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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
    """Told about complete chunks only, synchronously: it must be fast and must not call back."""

    def on_stored(self, event: StoredChunk) -> None: ...

    def on_removed(self, event: RemovedChunk) -> None: ...

    def on_cleared(self) -> None: ...
