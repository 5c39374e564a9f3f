"""Puts event batches into the directory. Duck-typed: events are `kvwire.v1.CacheEvent` or alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from kvwire.blend import BlendChunk, BlendIndex
from kvwire.coordinator.messages import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvwire.coordinator.directory import Holdings, KeyDirectory

STORE: Final = 1
ACCESS: Final = 2
DELETE: Final = 3
CLEAR: Final = 4
_KEY_BYTES: Final = 32
_MAX_BACKEND_BYTES: Final = 64
_MAX_PLACES: Final = 64
"""Stores that one server may have: names come from the wire and cost memory."""


class Event(Protocol):
    """Tokens are packed little-endian uint32; what a kind does not need is not read."""

    @property
    def kind(self) -> int: ...
    @property
    def chunk_key(self) -> bytes: ...
    @property
    def tier(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def tokens(self) -> bytes: ...
    @property
    def parent_key(self) -> bytes: ...
    @property
    def namespace_root(self) -> bytes: ...
    @property
    def access_count(self) -> int: ...


@dataclass(slots=True)
class Applied:
    """`unknown`: kinds that are newer than this program. `invalid`: entries outside the contract. `missed`:
    accesses and deletions of what was not known."""

    unknown: int = 0
    invalid: int = 0
    missed: int = 0

    def add(self, other: Applied) -> None:
        self.unknown += other.unknown
        self.invalid += other.invalid
        self.missed += other.missed


class Applier:
    """Applies events in their order, each for itself: a bad entry never stops the ones after it."""

    def __init__(self, directory: KeyDirectory, blend: BlendIndex | None = None) -> None:
        self._directory = directory
        self._blend = blend

    def events(
        self, holdings: Holdings, events: Iterable[Event], now: float, *, again: bool = False
    ) -> Applied:
        """`again`: they were applied before, on top of an older view; accesses count only once."""
        done = Applied()
        store = self._directory.store
        places = holdings.places
        tokens: list[BlendChunk] | None = None if self._blend is None else []
        for event in events:
            kind = event.kind
            if kind != STORE:
                self._other(holdings, kind, event, again, done)
                continue
            key, tier, backend, size = event.chunk_key, event.tier, event.backend, event.size_bytes
            known = (tier, backend) in places or _may_add(holdings, tier, backend)
            if len(key) != _KEY_BYTES or not size or not known:
                done.invalid += 1
                continue
            store(holdings, tier, backend, key, size, now)
            if tokens is not None:
                _note_tokens(tokens, event, key)
        self._index(tokens)
        return done

    def snapshot_page(self, holdings: Holdings, placements: Iterable[Event], now: float) -> Applied:
        done = Applied()
        tokens: list[BlendChunk] | None = None if self._blend is None else []
        for event in placements:
            key, tier, backend, size = event.chunk_key, event.tier, event.backend, event.size_bytes
            known = (tier, backend) in holdings.places or _may_add(holdings, tier, backend)
            if len(key) != _KEY_BYTES or not size or not known:
                done.invalid += 1
                continue
            self._directory.add_from_snapshot(holdings, tier, backend, key, size, now)
            if tokens is not None:
                _note_tokens(tokens, event, key)
        self._index(tokens)
        return done

    def _other(self, holdings: Holdings, kind: int, event: Event, again: bool, done: Applied) -> None:
        tier, backend, key = event.tier, event.backend, event.chunk_key
        if kind not in {ACCESS, DELETE, CLEAR}:
            done.unknown += 1
        elif tier not in {Tier.L1, Tier.L2} or len(key) != (0 if kind == CLEAR else _KEY_BYTES):
            done.invalid += 1
        elif kind == CLEAR:
            self._directory.clear(holdings, tier, backend)
        elif kind == DELETE:
            done.missed += not self._directory.delete(holdings, tier, backend, key)
        elif not again:
            known = self._directory.access(holdings, tier, backend, key, event.access_count)
            done.missed += not known

    def _index(self, tokens: list[BlendChunk] | None) -> None:
        if self._blend is not None and tokens:
            # A later entry of the batch may have removed the chunk again.
            holds = self._directory.holds
            self._blend.add([chunk for chunk in tokens if holds(chunk.key)])


def _note_tokens(noted: list[BlendChunk], event: Event, key: bytes) -> None:
    tokens = event.tokens
    if tokens:
        noted.append(BlendChunk(key, event.namespace_root, event.parent_key, tokens))


def _may_add(holdings: Holdings, tier: int, backend: str) -> bool:
    if tier not in {Tier.L1, Tier.L2} or len(backend.encode()) > _MAX_BACKEND_BYTES:
        return False
    return len(holdings.places) < _MAX_PLACES
