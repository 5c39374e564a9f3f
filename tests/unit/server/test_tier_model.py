"""A lower tier under everything at once: a storage that fails and is damaged, a server that is killed."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvwire.server.tiers import deleting, retrying
from kvwire.server.tiers.backends.base import Full, Refused, Unavailable
from kvwire.server.tiers.format import parse_name
from kvwire.server.tiers.tier import ReadFailed
from support.domain import OBJECT_BYTES
from support.tier_backend import FakeBackend, Heard, open_tier, settled
from support.tier_objects import data, get, key, put

pytestmark = pytest.mark.asyncio

ERRORS = (Unavailable, Unavailable, Full, Refused)
STORED = OBJECT_BYTES + 64
NUMBERS = 14


class Unreliable(FakeBackend):
    """Fails in one of `odds` calls, before or after it has done what it was asked."""

    def __init__(self, dice: random.Random, odds: int, values=None) -> None:
        super().__init__(values)
        self.dice = dice
        self.odds = odds
        self.harmed = dice.random() < 0.5

    async def write(self, name, parts) -> None:
        await self._maybe()
        if self._fails():
            raise self.dice.choice(ERRORS)("before")
        await super().write(name, parts)
        if self._fails():
            raise Unavailable("after it was written")

    async def read(self, name, parts) -> None:
        await self._maybe()
        await super().read(name, parts)
        if self._fails():
            raise Unavailable("while it was read")

    async def delete(self, names) -> None:
        await self._maybe()
        names = list(names)
        if self._fails():
            await super().delete(names[: len(names) // 2])
            raise Unavailable("half of them")
        await super().delete(names)

    def harm(self) -> None:
        objects = [name for name in self.values if parse_name(name).key]
        if objects and self.harmed:
            name = self.dice.choice(sorted(objects))
            value = self.values.pop(name)
            if self.dice.random() < 0.7:
                self.values[name] = self.dice.choice([value[:-1], value[:-1] + b"\xee", b""])

    def _fails(self) -> bool:
        return self.odds > 0 and self.dice.randrange(self.odds) == 0

    async def _maybe(self) -> None:
        for _ in range(self.dice.randrange(3)):
            await asyncio.sleep(0)


async def user(tier, backend: Unreliable, dice: random.Random, steps: int) -> None:
    for _ in range(steps):
        number = dice.randrange(NUMBERS)
        what = dice.random()
        if what < 0.55:
            await put(tier, number)
        elif what < 0.85:
            await read(tier, number)
        elif what < 0.9:
            tier.index.evict([key(number), key(number + 1)])
        elif what < 0.92:
            tier.index.clear()
        elif what < 0.95:
            backend.harm()
        else:
            tier.index.touch([key(number)], [1 << 40])
        await asyncio.sleep(0)


async def read(tier, number: int) -> bool:
    """The right bytes or none."""
    chunk = tier.index.get(key(number))
    if chunk is None or not chunk.mask:
        return False
    tier.index.pin(chunk)
    try:
        assert await get(tier, number) == data(number)
    except ReadFailed:
        return False
    finally:
        tier.index.unpin(chunk)
    return True


def whole(index) -> set[int]:
    return {int.from_bytes(chunk.key, "big") for chunk in index if chunk.is_complete}


@pytest.mark.parametrize("seed", range(60))
async def test_bl49_whatever_fails_nothing_wrong_is_read_and_every_byte_is_accounted(
    seed, monkeypatch
) -> None:
    monkeypatch.setattr(retrying, "FIRST_S", 0.0)
    monkeypatch.setattr(deleting, "FIRST_S", 0.0)
    dice = random.Random(seed)
    backend, heard = Unreliable(dice, dice.choice([0, 4, 12])), Heard()
    size = (1 << 20) if seed % 3 else 4096 + 6 * STORED
    async with open_tier(backend, size, heard=heard) as tier:
        users = [asyncio.create_task(user(tier, backend, dice, 60)) for _ in range(3)]
        killed = None
        while not all(each.done() for each in users):
            await asyncio.sleep(0)
            tier.index.check_integrity()
            assert tier.index.kept <= size
            assert backend.stored_bytes <= size
            if killed is None and dice.random() < 0.02:
                killed = (dict(backend.values), whole(tier.index))
        for each in users:
            each.result()
        backend.odds = 0
        await settled(tier)
        for number in range(NUMBERS):
            await read(tier, number)
        await settled(tier)
        assert tier.index.used == backend.stored_bytes
        assert backend.harmed or not tier.counters.damaged_objects
        good = whole(tier.index)
        assert told(heard) == good
    await restarted(dict(backend.values), good, size)
    if killed is not None:
        await restarted(*killed, size, exact=False)


def told(heard: Heard) -> set[int]:
    """What listeners think is there."""
    there: set[int] = set()
    for kind, name in heard.log:
        number = int.from_bytes(name, "big")
        if kind == "clear":
            there.clear()
        elif kind == "store":
            assert number not in there
            there.add(number)
        else:
            there.remove(number)
    return there


async def restarted(values: dict[str, bytes], committed: set[int], size: int, *, exact: bool = True) -> None:
    """What a next run finds: all that was told to be there, unless it was damaged, and nothing wrong."""
    damaged = {number for number in committed if not intact(values, number)}
    backend = FakeBackend(values)
    async with open_tier(backend, size) as tier:
        await settled(tier)
        assert tier.index.used == backend.stored_bytes <= size
        if exact:
            assert whole(tier.index) == committed
        found = {number for number in range(NUMBERS) if await read(tier, number)}
        assert found >= committed - damaged
        await settled(tier)
        assert tier.index.used == backend.stored_bytes
        tier.index.check_integrity()


def intact(values: dict[str, bytes], number: int) -> bool:
    name = next((name for name in values if name.endswith(f"{key(number).hex()}.0")), None)
    return name is not None and values[name][64:] == data(number)
