"""Objects in memory, and in a tier over a fake storage, named by numbers."""

from __future__ import annotations

import time

from kvwire.server.layout import ShardMap
from kvwire.server.store import Space
from kvwire.server.store.objects import Chunk, ObjectState, StoredObject
from kvwire.transfer.checksum import checksum
from support.domain import CHUNK, OBJECT_BYTES, layout

SPACE = Space(b"r" * 32, b"b" * 32, "model", "", ShardMap(layout(), CHUNK))


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def data(number: int) -> bytes:
    return bytes([number % 256]) * OBJECT_BYTES


def resident(number: int, space: Space = SPACE) -> StoredObject:
    """A sealed object of chunk `number` in memory; its bytes are those of `data`."""
    chunk = Chunk(key(number), b"", space, [None], stamp=number)
    stored = StoredObject(chunk, 0, 0, OBJECT_BYTES, OBJECT_BYTES, 1, ObjectState.RESIDENT)
    stored.checksum = checksum(data(number))
    chunk.shards[0] = stored
    return stored


async def put(tier, number: int, space: Space = SPACE) -> bool:
    return await tier.write(resident(number, space), memoryview(data(number)))


async def get(tier, number: int, seconds: float = 10) -> bytes:
    """What the tier reads of an object. Raises ReadFailed."""
    into = bytearray(OBJECT_BYTES)
    chunk = tier.index.get(key(number))
    assert await tier.read(chunk, 0, memoryview(into), time.monotonic() + seconds) == checksum(bytes(into))
    return bytes(into)
