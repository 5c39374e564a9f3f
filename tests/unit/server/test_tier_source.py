"""A lower tier as a source: what it finds it keeps until it is let go, and every target ends once."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvwire.errors import ChecksumMismatch, KvwireError, TransferFailed
from kvwire.server.fetch.source import Target, Wanted
from kvwire.server.layout import ShardMap
from kvwire.server.store import Space
from kvwire.server.tiers.backends.base import Refused, Unavailable
from kvwire.server.tiers.source import TierSource
from kvwire.transfer.checksum import checksum
from support.domain import CHUNK, OBJECT_BYTES, layout
from support.tier_backend import FakeBackend, open_tier, settled, until
from support.tier_objects import SPACE, data, key, put

pytestmark = pytest.mark.asyncio


class Asked:
    """A source over a tier with chunks 0 to `count` - 1, and what its targets got."""

    def __init__(self, tier) -> None:
        self.tier = tier
        self.used: list[bytes] = []
        self.done: dict[int, tuple[bytes, KvwireError | None]] = {}
        self.buffers: dict[int, bytearray] = {}
        self.clock = 1000
        self.source = TierSource(tier, self.stamps, self.used.extend)

    def stamps(self, count: int) -> range:
        self.clock += count
        return range(self.clock, self.clock - count, -1)

    async def find(self, *numbers: int, masks=None, space: Space = SPACE):
        keys = [key(number) for number in numbers]
        return await self.source.find(Wanted(space, keys, masks or [0] * len(keys)), time.monotonic() + 10)

    async def fetch(self, found, *indexes: int, seconds: float = 10) -> None:
        targets = []
        for index in indexes:
            self.buffers[index] = buffer = bytearray(OBJECT_BYTES)
            targets.append(Target(index, 0, OBJECT_BYTES, memoryview(buffer)))
        await found.fetch(targets, self.end, time.monotonic() + seconds)

    def end(self, target: Target, digest: bytes, error: KvwireError | None) -> None:
        assert target.index not in self.done
        self.done[target.index] = (digest, error)

    def errors(self) -> dict[int, type]:
        return {index: type(error) for index, (_, error) in self.done.items() if error is not None}


async def test_found_fetched_and_let_go() -> None:
    async with open_tier(FakeBackend()) as tier:
        for number in range(3):
            await put(tier, number)
        asked = Asked(tier)
        found = await asked.find(0, 1, 2, 3, masks=[1, 0, 0, 0])
        assert found is not None
        assert list(found.masks) == [0, 1, 1, 0]
        assert asked.used == [key(1), key(2)]
        await asked.fetch(found, 1, 2)
        for index in (1, 2):
            assert asked.done[index] == (checksum(data(index)), None)
            assert asked.buffers[index] == data(index)
        # Held while it may still be fetched, and no longer.
        assert tier.index.evict([key(0), key(1), key(2)]) == (1, 2)
        await found.release()
        await found.release()
        assert tier.index.evict([key(1), key(2)]) == (2, 0)
        assert await asked.find(0, 1, 2) is None


async def test_a_prompt_that_was_asked_for_goes_last_and_its_head_last_of_all() -> None:
    async with open_tier(FakeBackend()) as tier:
        for number in range(6):
            await put(tier, number)
        found = await Asked(tier).find(0, 1, 2)
        await found.release()
        stamps = [tier.index.get(key(number)).stamp for number in (3, 4, 5, 2, 1, 0)]
        assert stamps == sorted(stamps)


async def test_another_layout_finds_nothing() -> None:
    async with open_tier(FakeBackend()) as tier:
        await put(tier, 1)
        other = Space(SPACE.root, SPACE.base_root, "model", "", ShardMap(layout(2), CHUNK))
        assert await Asked(tier).find(1, space=other) is None


async def test_a_tier_that_was_not_read_yet_has_nothing() -> None:
    backend = FakeBackend()
    async with open_tier(backend) as tier:
        await put(tier, 1)
    backend.errors["open"] = [Unavailable("away")]
    async with open_tier(backend) as tier:
        assert await Asked(tier).find(1) is None


async def test_bl49_what_goes_wrong_with_one_object_is_no_matter_of_the_others() -> None:
    backend = FakeBackend()
    async with open_tier(backend) as tier:
        for number in range(6):
            await put(tier, number)
        names = {number: next(n for n in backend.values if n.endswith(f"{number}.0")) for number in range(6)}
        asked = Asked(tier)
        found = await asked.find(*range(6))
        backend.values[names[1]] = b"cut"
        backend.values[names[2]] = backend.values[names[2]][:-1] + b"\xff"
        del backend.values[names[3]]
        await asked.fetch(found, *range(6))
        assert asked.errors() == {1: ChecksumMismatch, 2: ChecksumMismatch, 3: ChecksumMismatch}
        await found.release()
        assert list((await asked.find(*range(6))).masks) == [1, 0, 0, 0, 1, 1]
        await settled(tier)
        assert tier.index.used == backend.stored_bytes
        tier.index.check_integrity()


async def test_a_storage_that_does_not_answer_is_given_up_in_time() -> None:
    backend = FakeBackend()
    async with open_tier(backend) as tier:
        for number in range(12):
            await put(tier, number)
        backend.gates["read"] = asyncio.Event()
        asked = Asked(tier)
        found = await asked.find(*range(12))
        await asked.fetch(found, *range(12), seconds=0.05)
        assert asked.errors() == dict.fromkeys(range(12), TransferFailed)
        await found.release()
        assert len(tier.index) == 12
        assert tier.counters.failed_reads == 12


async def test_a_storage_that_fails_now_and_then_is_asked_again() -> None:
    backend = FakeBackend()
    async with open_tier(backend) as tier:
        await put(tier, 1)
        backend.errors["read"] = [Unavailable("busy")]
        asked = Asked(tier)
        found = await asked.find(1)
        await asked.fetch(found, 0)
        assert asked.errors() == {}
        backend.errors["read"] = [Refused("denied")]
        asked.done.clear()
        await asked.fetch(found, 0)
        assert asked.errors() == {0: TransferFailed}
        assert tier.status().problem == "cannot be read: denied"
        await found.release()


async def test_a_cancelled_fetch_touches_nothing_afterwards() -> None:
    backend = FakeBackend()
    async with open_tier(backend) as tier:
        await put(tier, 1)
        gate = backend.gates["read"] = asyncio.Event()
        asked = Asked(tier)
        found = await asked.find(1)
        running = asyncio.create_task(asked.fetch(found, 0))
        await until(lambda: backend.calls["read"])
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        gate.set()
        await asyncio.sleep(0.01)
        assert asked.buffers[0] == bytes(OBJECT_BYTES)
        await found.release()
        assert tier.index.evict([key(1)]) == (1, 0)


async def test_an_error_of_this_program_fails_the_object_and_raises_nothing(monkeypatch) -> None:
    async with open_tier(FakeBackend()) as tier:
        await put(tier, 1)
        asked = Asked(tier)
        found = await asked.find(1)

        def broken(*_):
            raise ZeroDivisionError

        monkeypatch.setattr(tier, "read", broken)
        await asked.fetch(found, 0)
        assert asked.errors() == {0: TransferFailed}
        await found.release()
