"""Where objects are brought from, in memory, with all that a real one may do wrong."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field

from kvwire.errors import ChecksumMismatch, TransferFailed
from kvwire.server.fetch.source import Origin
from kvwire.transfer.checksum import checksum

Name = tuple[bytes, int]  # key, shard


def content(name: Name, size: int) -> bytes:
    return hashlib.shake_128(name[0] + bytes([name[1]])).digest(size)


@dataclass(eq=False)
class FakeSource:
    """`objects` are what it has. `broken` ones fail, `damaged` ones are found not to match their checksum.

    `gate` holds fetches up until it is set. `promises` are told to be there and are not.
    """

    name: str = "disk"
    origin: Origin = Origin.L2
    objects: set[Name] = field(default_factory=set)
    # Other bytes than `content`, by object.
    copies: dict[Name, bytes] = field(default_factory=dict)
    broken: set[Name] = field(default_factory=set)
    damaged: set[Name] = field(default_factory=set)
    promises: set[Name] = field(default_factory=set)
    gate: asyncio.Event | None = None
    asking: asyncio.Event | None = None
    # Of a fetch: raises after so many objects; forgets to tell of the rest; ignores the limit and cancelling.
    raises_after: int = -1
    silent_after: int = -1
    stubborn: asyncio.Event | None = None
    find_raises: bool = False
    masks_are: list[int] | None = None
    bad_checksum: bool = False
    tells_twice: bool = False
    # What was asked of it.
    asked: list[tuple[int, ...]] = field(default_factory=list)
    fetched: list[Name] = field(default_factory=list)
    begun: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    held: int = 0

    def have(self, keys, shards=(0,), but=()) -> FakeSource:
        self.objects |= {(key, shard) for key in keys for shard in shards} - set(but)
        return self

    async def began(self):
        """Wait until bytes are asked for."""
        while not self.begun:  # noqa: ASYNC110 - a test looks from outside
            await asyncio.sleep(0)

    async def find(self, wanted, until):
        self.asked.append(tuple(wanted.masks))
        if self.asking is not None:
            await self.asking.wait()
        if self.find_raises:
            raise RuntimeError("cannot find anything")
        shards = range(wanted.space.shards.num_shards)
        masks = [
            sum(1 << s for s in shards if (key, s) in self.objects | self.promises) & ~mask
            for key, mask in zip(wanted.keys, wanted.masks, strict=True)
        ]
        if self.masks_are is not None:
            masks = self.masks_are
        if not any(masks):
            return None
        self.held += 1
        return FakeFound(self, list(wanted.keys), masks)


@dataclass(eq=False)
class FakeFound:
    source: FakeSource
    keys: list[bytes]
    masks: list[int]

    async def fetch(self, targets, done, until):
        source = self.source
        source.begun += 1
        size = sum(target.size for target in targets)
        source.in_flight += size
        source.most_in_flight = max(source.most_in_flight, source.in_flight)
        try:
            await self._fetch(targets, done)
        except asyncio.CancelledError:
            if source.stubborn is None:
                raise
            await source.stubborn.wait()
            for target in targets:
                target.view[:] = b"\xee" * target.size
        finally:
            source.in_flight -= size

    async def _fetch(self, targets, done):
        source = self.source
        for count, target in enumerate(targets):
            if source.gate is not None:
                await source.gate.wait()
            if count == source.raises_after:
                raise RuntimeError("the fetch broke")
            if count == source.silent_after:
                return
            self._one(target, done)
            await asyncio.sleep(0)

    def _one(self, target, done):
        source, name = self.source, (self.keys[target.index], target.shard)
        source.fetched.append(name)
        data = source.copies.get(name) or content(name, target.size)
        if name in source.broken or name not in source.objects:
            target.view[: target.size // 2] = data[: target.size // 2]
            done(target, b"", TransferFailed("it broke in the middle"))
        elif name in source.damaged:
            target.view[:] = b"\x00" * target.size
            done(target, b"", ChecksumMismatch("other bytes than were stored"))
        else:
            target.view[:] = data
            done(target, b"short" if source.bad_checksum else checksum(data), None)
        if source.tells_twice:
            done(target, b"", TransferFailed("once more"))

    async def release(self):
        self.source.held -= 1
