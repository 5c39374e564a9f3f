"""One lower tier over a storage that fails as told."""

from __future__ import annotations

import time

import pytest

from kvwire.server.layout import ShardMap
from kvwire.server.store import Space
from kvwire.server.store.objects import Chunk, ObjectState, StoredObject
from kvwire.server.tiers.backends.base import Full, Unavailable
from kvwire.server.tiers.tier import ReadFailed
from kvwire.transfer.checksum import checksum
from support.domain import CHUNK, OBJECT_BYTES, layout
from support.tier_backend import FakeBackend, Heard, open_tier, settled

pytestmark = pytest.mark.asyncio

SPACE = Space(b"r" * 32, b"b" * 32, "model", "", ShardMap(layout(), CHUNK))


def resident(number: int, parent: Chunk | None = None, space: Space = SPACE) -> StoredObject:
    """A sealed object of chunk `number` in memory; its bytes are those of `data`."""
    key = number.to_bytes(32, "big")
    chunk = Chunk(key, parent.key if parent else b"", space, [None], parent=parent, stamp=number)
    stored = StoredObject(chunk, 0, 0, OBJECT_BYTES, OBJECT_BYTES, 1, ObjectState.RESIDENT)
    stored.checksum = checksum(data(number))
    chunk.shards[0] = stored
    return stored


def data(number: int) -> bytes:
    return bytes([number % 256]) * OBJECT_BYTES


async def put(tier, number: int) -> bool:
    return await tier.write(resident(number), memoryview(data(number)))


async def get(tier, number: int) -> bytes:
    into = bytearray(OBJECT_BYTES)
    chunk = tier.index.get(number.to_bytes(32, "big"))
    assert await tier.read(chunk, 0, memoryview(into), time.monotonic() + 10) == checksum(bytes(into))
    return bytes(into)


async def test_what_was_written_is_read_also_by_the_next_run() -> None:
    backend, heard = FakeBackend(), Heard()
    async with open_tier(backend, heard=heard) as tier:
        assert await put(tier, 1)
        assert await put(tier, 2)
        assert await get(tier, 1) == data(1)
        assert heard.take() == [
            ("clear", b""),
            ("store", (1).to_bytes(32, "big")),
            ("store", (2).to_bytes(32, "big")),
        ]
        assert tier.index.used == backend.stored_bytes
    async with open_tier(backend, heard=heard) as tier:
        assert [kind for kind, _ in heard.take()] == ["clear", "store", "store"]
        assert await get(tier, 2) == data(2)
        assert tier.index.used == backend.stored_bytes
        tier.index.check_integrity()


async def test_a_write_is_repeated_and_counts_once_it_is_there() -> None:
    backend = FakeBackend()
    async with open_tier(backend) as tier:
        backend.errors["write"] = [Unavailable("no"), Unavailable("no")]
        assert await put(tier, 1)
        assert (tier.counters.written_objects, tier.counters.failed_writes) == (1, 0)


async def test_bl49_a_full_disk_leaves_nothing_and_no_event() -> None:
    backend, heard = FakeBackend(), Heard()
    async with open_tier(backend, heard=heard) as tier:
        await put(tier, 1)
        heard.take()
        backend.errors["write"] = [Full("no space left")]
        assert not await put(tier, 2)
        assert tier.status().problem == "cannot be written to: no space left"
        assert tier.counters.failed_writes == 1
        await settled(tier)
        assert heard.take() == []
        assert tier.index.used == backend.stored_bytes
        assert await put(tier, 3)
        assert tier.status().problem == ""


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "header"])
async def test_bl49_what_was_damaged_is_dropped_and_told(damage: str) -> None:
    backend, heard = FakeBackend(), Heard()
    async with open_tier(backend, heard=heard) as tier:
        await put(tier, 1)
        await put(tier, 2)
        heard.take()
        name = next(each for each in backend.values if each.endswith("1.0"))
        value = backend.values[name]
        damaged = {"flip": value[:-1] + b"\xff", "cut": value[:-1], "header": b"x" + value[1:]}
        if damage == "delete":
            del backend.values[name]
        else:
            backend.values[name] = damaged[damage]
        with pytest.raises(ReadFailed) as failed:
            await get(tier, 1)
        assert failed.value.damaged
        assert heard.take() == [("delete", (1).to_bytes(32, "big"))]
        await settled(tier)
        assert name not in backend.values
        assert tier.index.used == backend.stored_bytes
        assert await put(tier, 1)
        assert await get(tier, 1) == data(1)
        assert tier.counters.damaged_objects == 1


async def test_bl49_cleaning_up_leaves_a_newer_object_alone() -> None:
    backend = FakeBackend()
    async with open_tier(backend) as tier:
        await put(tier, 1)
        chunk = tier.index.get((1).to_bytes(32, "big"))
        old = chunk.objects[0]
        tier.index.evict([chunk.key])
        await put(tier, 1)
        assert not tier.index.drop_object(chunk, 0, old)
        newer = tier.index.get(chunk.key)
        assert newer is not chunk
        assert await get(tier, 1) == data(1)
