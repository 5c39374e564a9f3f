"""What is cached here, tier by tier, as operators see and drop it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from kvwire.errors import InvalidArgument, Unavailable
from kvwire.server.quotas import L1, L2, MEMORY
from kvwire.server.spaces import base_of, identify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvwire.keys import Namespace
    from kvwire.server.store import Chunk, L1Store
    from kvwire.server.tiers.entries import TierChunk
    from kvwire.server.tiers.tier import Tier

    Meant = Callable[[bytes, int, str], bool]
    """Base root, chunk size, tenant."""

ALL_TIERS: Final = 0
MAX_SCAN: Final = 8192
"""Chunks that are looked at for one page, so that a rare tenant does not stop the server."""

_POSITION: Final = re.compile(r"([0-9]{1,4})-([0-9]{1,19})")


@dataclass(frozen=True, slots=True)
class HeldChunk:
    """A chunk in one tier. `tenant` is a digest of the salt, empty without one."""

    key: bytes
    tier: int
    backend: str
    model: str
    tenant: str
    size: int
    objects: int
    complete: bool
    leases: int
    pinned: bool


@dataclass(frozen=True, slots=True)
class Page:
    """`next` continues the listing; empty after the last page."""

    chunks: list[HeldChunk]
    next: str


class Level(Protocol):
    """One store."""

    tier: int

    def check(self) -> None:
        """Raises Unavailable while it does not know what it holds."""

    def after(self, serial: int, tenant: str | None) -> Iterator[tuple[int, HeldChunk | None]]:
        """Serials behind this one, with the chunk if it is of the tenant. Nothing changes meanwhile."""

    def evict(self, keys: Sequence[bytes]) -> tuple[int, int]: ...

    def clear(self, meant: Meant | None) -> tuple[int, int]: ...


class Holdings:
    """The memory and the stores below it. What lies in several counts in each."""

    def __init__(self, memory: L1Store) -> None:
        self._levels: list[Level] = [_Memory(memory)]

    def attach(self, name: str, tier: Tier) -> None:
        """A store of the tier L2, by the name of its backend."""
        self._levels.append(_Lower(name, tier))

    def page(self, token: str, count: int, tier: int = ALL_TIERS, tenant: str | None = None) -> Page:
        """Up to `count` chunks of one store, of one tenant if given. Raises InvalidArgument for a bad token.

        A chunk that is in a store during the whole listing is met there exactly once.
        """
        levels = self._of(tier)
        number, last = _position(token)
        if token and number >= len(levels):
            raise InvalidArgument("page_token", "is not one that this server gave for these tiers")
        found: list[HeldChunk] = []
        if number < len(levels):
            for looked, (serial, held) in enumerate(levels[number].after(last, tenant)):
                if len(found) == count or looked == MAX_SCAN:
                    return Page(found, f"{number}-{last}")
                last = serial
                if held is not None:
                    found.append(held)
        return Page(found, f"{number + 1}-0" if number + 1 < len(levels) else "")

    def evict(self, keys: Iterable[bytes], tier: int = ALL_TIERS) -> tuple[int, int]:
        """Drop these chunks where nothing holds them. Returns (chunks dropped, chunks kept).

        Raises Unavailable, and drops nothing, while a store does not know what it holds.
        """
        wanted = list(dict.fromkeys(keys))
        return _sums(level.evict(wanted) for level in self._checked(tier))

    def clear(
        self, tier: int = ALL_TIERS, namespace: Namespace | None = None, tenant: str | None = None
    ) -> tuple[int, int]:
        """Drop what nothing holds, of one base namespace or tenant. Returns (chunks dropped, chunks kept).

        Raises Unavailable, and drops nothing, while a store does not know what it holds.
        """
        base = base_of(namespace) if namespace is not None else None

        def meant(base_root: bytes, chunk_size: int, owner: str) -> bool:
            its = base is None or identify(base, chunk_size).root == base_root
            return its and tenant in (None, owner)

        wanted = None if base is None and tenant is None else meant
        return _sums(level.clear(wanted) for level in self._checked(tier))

    def _of(self, tier: int) -> list[Level]:
        """What is asked of a tier that this server does not have is done."""
        return [level for level in self._levels if tier in (ALL_TIERS, level.tier)]

    def _checked(self, tier: int) -> list[Level]:
        levels = self._of(tier)
        for level in levels:
            level.check()
        return levels


class _Memory:
    tier = L1

    def __init__(self, store: L1Store) -> None:
        self._store = store

    def check(self) -> None:
        """The memory always knows."""

    def after(self, serial: int, tenant: str | None) -> Iterator[tuple[int, HeldChunk | None]]:
        for chunk in self._store.tree.listing.after(serial):
            shown = chunk.mask and tenant in (None, chunk.space.tenant)
            yield chunk.serial, _in_memory(chunk) if shown else None

    def evict(self, keys: Sequence[bytes]) -> tuple[int, int]:
        return self._store.eviction.drop(keys)

    def clear(self, meant: Meant | None) -> tuple[int, int]:
        if meant is None:
            return self._store.clear()
        return self._store.clear(lambda space: meant(space.base_root, space.shards.chunk_size, space.tenant))


class _Lower:
    tier = L2

    def __init__(self, name: str, tier: Tier) -> None:
        self._name = name
        self._tier = tier
        self._index = tier.index

    def check(self) -> None:
        if not self._tier.ready:
            why = self._tier.problems.now or "it is being read"
            raise Unavailable(
                f"What the tier L2 {self._name} holds is not known yet ({why}): nothing was dropped. "
                "Try again, or name the tier L1 alone."
            )

    def after(self, serial: int, tenant: str | None) -> Iterator[tuple[int, HeldChunk | None]]:
        for chunk in self._index.page(serial, MAX_SCAN + 1):
            shown = chunk.mask and tenant in (None, chunk.space.tenant)
            yield chunk.serial, _stored(chunk, self._name) if shown else None

    def evict(self, keys: Sequence[bytes]) -> tuple[int, int]:
        return self._index.evict(keys)

    def clear(self, meant: Meant | None) -> tuple[int, int]:
        if meant is None:
            return self._index.clear()
        return self._index.clear(lambda chunk: _is_meant(chunk, meant))


def _is_meant(chunk: TierChunk, meant: Meant) -> bool:
    manifest = chunk.space.manifest
    return meant(manifest.base_root, manifest.chunk_size, manifest.tenant)


def _in_memory(chunk: Chunk) -> HeldChunk:
    return HeldChunk(
        key=chunk.key,
        tier=L1,
        backend=MEMORY,
        model=chunk.space.model,
        tenant=chunk.space.tenant,
        size=chunk.size,
        objects=chunk.mask.bit_count(),
        complete=chunk.is_complete,
        leases=chunk.pins,
        pinned=chunk.kept,
    )


def _stored(chunk: TierChunk, backend: str) -> HeldChunk:
    return HeldChunk(
        key=chunk.key,
        tier=L2,
        backend=backend,
        model=chunk.space.manifest.model,
        tenant=chunk.space.tenant,
        size=chunk.size,
        objects=chunk.mask.bit_count(),
        complete=chunk.is_complete,
        leases=chunk.pins,
        pinned=False,
    )


def _position(token: str) -> tuple[int, int]:
    if not token:
        return 0, 0
    match = _POSITION.fullmatch(token)
    if match is None:
        raise InvalidArgument("page_token", "is not one that this server gave")
    return int(match[1]), int(match[2])


def _sums(counts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    pairs = list(counts)
    return sum(dropped for dropped, _ in pairs), sum(kept for _, kept in pairs)
