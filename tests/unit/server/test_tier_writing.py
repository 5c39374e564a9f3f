"""From memory to a lower tier: what is stored, and what has to leave."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from kvwire.server.engine import make_store
from kvwire.server.sealing import Sealer
from kvwire.server.store import ObjectState, StoredObject
from kvwire.server.tiers import writer as writing
from kvwire.server.tiers.backends.base import Unavailable
from kvwire.server.tiers.spilling import Spiller
from kvwire.server.tiers.writer import Saving, Writer
from kvwire.transfer.checksum import checksum
from support.domain import BLOCK_BYTES, OBJECT_BYTES
from support.tier_backend import FakeBackend, open_tier, settled, until
from support.tier_objects import SPACE, data, key

pytestmark = pytest.mark.asyncio


class Memory:
    """A store with room for `pool` objects over real bytes, and a tier under it."""

    def __init__(self, tier, pool: int = 8) -> None:
        self.tier = tier
        self.store = make_store(pool * OBJECT_BYTES, base=0, alignment=BLOCK_BYTES)
        self.bytes = memoryview(bytearray(pool * OBJECT_BYTES))
        self.sealer = Sealer(self.view, self.set_checksum)
        self.saving = Saving(tier, self.store, self.view)
        self.space = SPACE.__class__(SPACE.root, SPACE.base_root, "model", "", SPACE.shards)

    def view(self, offset: int, size: int) -> memoryview:
        return self.bytes[offset : offset + size]

    def set_checksum(self, ref, digest: bytes) -> bool:
        stored = self.store.resolve(ref)
        stored.checksum = digest
        return True

    def put(self, number: int, *, parent: int | None = None, sealed: bool = True) -> StoredObject:
        stamp = self.store.refresh((None,))
        above = key(parent) if parent is not None else b""
        stored = self.store.reserve(self.space, key(number), above, 0, lease_id=1, stamp=stamp, protect=stamp)
        assert stored is not None
        self.view(stored.offset, stored.size)[:] = data(number)
        self.store.commit(stored, checksum(data(number)) if sealed else b"")
        return stored

    def there(self) -> list[int]:
        return sorted(int.from_bytes(chunk.key, "big") for chunk in self.tier.index)

    def held(self) -> int:
        return sum(chunk.pins for chunk in self.store.chunks())

    def check(self) -> None:
        self.store.check_integrity()
        self.tier.index.check_integrity()
        assert not any(chunk.pins for chunk in self.store.chunks())


@contextlib.asynccontextmanager
async def running(backend: FakeBackend, pool: int = 8):
    """Memory, and its writer, which runs."""
    async with open_tier(backend) as tier:
        memory = Memory(tier, pool)
        writer = Writer(memory.saving, memory.sealer.quiet)
        memory.store.on_sealed = writer.offer
        task = asyncio.create_task(writer.run())
        try:
            yield memory, writer
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            memory.sealer.close()


async def test_what_is_stored_is_written_once_it_has_a_checksum() -> None:
    async with running(FakeBackend()) as (memory, writer):
        memory.put(1)
        unsealed = memory.put(2, sealed=False)
        await until(lambda: not writer.waiting)
        assert memory.there() == [1]
        unsealed.checksum = checksum(data(2))
        memory.store.sealed(unsealed)
        await until(lambda: not writer.waiting)
        assert memory.there() == [1, 2]
        memory.store.sealed(unsealed)
        await until(lambda: not writer.waiting)
        assert memory.tier.counters.written_objects == 2
        memory.check()


async def test_a_chunk_stays_in_memory_while_it_is_written() -> None:
    backend = FakeBackend()
    async with running(backend) as (memory, writer):
        gate = backend.gates["write"] = asyncio.Event()
        stored = memory.put(1)
        await until(lambda: backend.calls["write"])
        assert memory.store.evict_to(0) == 0
        gate.set()
        await until(lambda: not writer.waiting)
        assert memory.store.evict_to(0) == OBJECT_BYTES
        assert stored.state is ObjectState.FREED
        assert memory.there() == [1]


async def test_bl52_what_is_being_written_gives_way_and_the_writer_goes_on() -> None:
    backend = FakeBackend()
    async with running(backend) as (memory, writer):
        gate = backend.gates["write"] = asyncio.Event()
        for number in range(3):
            memory.put(number)
        await until(lambda: memory.held() == 3)
        await writer.give_way()
        assert memory.store.evict_to(OBJECT_BYTES) == 2 * OBJECT_BYTES
        await until(lambda: memory.tier.counters.skipped_objects == 3)
        gate.set()
        memory.put(4)
        await until(lambda: not writer.waiting)
        await settled(memory.tier)
        # What is still in memory is written after all.
        assert memory.there() == [2, 4]
        assert memory.tier.index.used == backend.stored_bytes
        memory.check()


async def test_what_waits_is_not_held_and_is_skipped_when_it_has_gone() -> None:
    backend = FakeBackend()
    async with running(backend) as (memory, writer):
        gate = backend.gates["write"] = asyncio.Event()
        for number in range(writing.MORE_WRITES + 2):
            memory.put(number)
        await until(lambda: memory.held() == writing.MORE_WRITES)
        assert memory.store.evict_to(0) == 2 * OBJECT_BYTES
        gate.set()
        await until(lambda: not writer.waiting)
        assert memory.there() == list(range(writing.MORE_WRITES))
        assert memory.tier.counters.skipped_objects == 2
        memory.check()


async def test_the_queue_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(writing, "MAX_QUEUED", 2)
    backend = FakeBackend()
    async with running(backend) as (memory, writer):
        for number in range(5):
            memory.put(number)
        await until(lambda: not writer.waiting)
        assert memory.there() == [0, 1]
        assert memory.tier.counters.skipped_objects == 3
        memory.check()


async def test_what_a_storage_has_missed_is_written_when_it_works_again() -> None:
    backend = FakeBackend()
    async with running(backend) as (memory, writer):
        memory.put(0)
        await until(lambda: not writer.waiting)
        backend.errors["write"] = [Unavailable("away")] * 4
        memory.tier.problems.failed("cannot be written to", "away")
        for number in range(1, 5):
            memory.put(number)
        await until(lambda: not writer.waiting)
        assert memory.there() == [0]
        assert memory.tier.counters.failed_writes == 4
        memory.put(5)
        await until(lambda: not writer.waiting)
        assert memory.there() == list(range(6))
        assert memory.tier.status().problem == ""
        await settled(memory.tier)
        assert memory.tier.index.used == backend.stored_bytes
        memory.check()


async def test_an_error_of_this_program_is_counted_and_the_writer_goes_on(monkeypatch) -> None:
    async with running(FakeBackend()) as (memory, writer):
        broken = memory.put(1)
        monkeypatch.setattr(
            memory.tier.index,
            "follow_up",
            lambda chunk: 1 / 0 if chunk is broken.chunk else None,
        )
        memory.put(2)
        await until(lambda: not writer.waiting)
        assert memory.there() == [2]
        assert memory.tier.counters.failed_writes == 1
        memory.check()


async def test_the_recency_of_a_chain_is_that_of_memory() -> None:
    async with running(FakeBackend()) as (memory, writer):
        for number in range(4):
            memory.put(number, parent=number - 1 if number else None)
            memory.store.refresh([memory.store.get(key(each)) for each in range(number + 1)])
            await until(lambda: not writer.waiting)
        last = memory.put(4, parent=3)
        await until(lambda: not writer.waiting)
        for number in range(4):
            assert memory.tier.index.get(key(number)).stamp == memory.store.get(key(number)).stamp
        assert memory.tier.index.get(key(4)).stamp == last.chunk.stamp


@contextlib.asynccontextmanager
async def spilling(backend: FakeBackend, watermark: float = 0.75):
    """Memory for eight objects, and its spiller: begins above 4, evicts down to 6."""
    async with open_tier(backend) as tier:
        memory = Memory(tier)
        spiller = Spiller([memory.saving], memory.store, memory.sealer, watermark)
        memory.sealer.hurry()
        task = asyncio.create_task(spiller.run())
        try:
            yield memory, spiller
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await spiller.close()
            memory.check()
            memory.sealer.close()


def used(memory: Memory) -> int:
    return memory.store.allocator.used // OBJECT_BYTES


async def test_above_the_watermark_memory_is_written_and_then_evicted() -> None:
    async with spilling(FakeBackend()) as (memory, spiller):
        for number in range(4):
            memory.put(number, sealed=number != 2)
        spiller.poke()
        await asyncio.sleep(0.01)
        assert memory.there() == []
        memory.put(4)
        memory.put(5)
        spiller.poke()
        await until(lambda: memory.there() == [0, 1])
        assert used(memory) == 6
        for number in (6, 7):
            memory.put(number)
        spiller.poke()
        await until(lambda: memory.there() == [0, 1, 2, 3] and used(memory) == 6)
        assert memory.tier.counters.skipped_objects == 0


async def test_what_is_needed_at_once_is_written_before_it_goes() -> None:
    async with spilling(FakeBackend(), watermark=1.0) as (memory, spiller):
        for number in range(8):
            memory.put(number)
        await spiller.make_way({"": 3 * OBJECT_BYTES}, time.monotonic() + 10)
        assert memory.there() == [0, 1, 2]
        assert used(memory) == 8
        await spiller.make_way({"": 3 * OBJECT_BYTES}, time.monotonic() + 10)
        assert memory.tier.counters.written_objects == 3


async def test_bl52_a_storage_that_hangs_holds_nothing_for_long() -> None:
    backend = FakeBackend()
    async with spilling(backend, watermark=1.0) as (memory, spiller):
        for number in range(8):
            memory.put(number)
        backend.gates["write"] = asyncio.Event()
        await spiller.make_way({"": 8 * OBJECT_BYTES}, time.monotonic() + 0.05)
        assert not any(chunk.pins for chunk in memory.store.chunks())
        assert memory.store.evict_to(0) == 8 * OBJECT_BYTES
        assert memory.there() == []


async def test_bl52_what_is_written_in_the_background_gives_way_too() -> None:
    backend = FakeBackend()
    async with spilling(backend) as (memory, spiller):
        backend.gates["write"] = asyncio.Event()
        for number in range(8):
            memory.put(number)
        spiller.poke()
        await until(lambda: spiller.waiting)
        await spiller.make_way({"": 8 * OBJECT_BYTES}, time.monotonic() + 0.05)
        # It goes on with the next one at once.
        assert memory.store.evict_to(0) >= 7 * OBJECT_BYTES


async def test_bl52_a_storage_that_fails_is_not_waited_for() -> None:
    backend = FakeBackend()
    async with spilling(backend) as (memory, spiller):
        backend.errors["write"] = [Unavailable("away")] * 100
        memory.tier.problems.failed("cannot be written to", "away")
        for number in range(8):
            memory.put(number)
        await spiller.make_way({"": 4 * OBJECT_BYTES}, time.monotonic() + 10)
        assert not backend.calls["write"]
        spiller.poke()
        await until(lambda: used(memory) == 6)
        # One attempt at a time shows when it works again.
        assert backend.calls["write"] <= 2
        backend.errors.clear()
        spiller.poke()
        await until(lambda: not memory.tier.problems.now)


async def test_at_the_end_everything_is_written_the_latest_first() -> None:
    backend = FakeBackend()
    async with spilling(backend) as (memory, spiller):
        for number in range(4):
            memory.put(number)
        await spiller.save_all(time.monotonic() + 10)
        assert memory.there() == [0, 1, 2, 3]
        order = [int(name.split("/")[-1].split(".")[0], 16) for name in backend.values if "." in name]
        assert order == [3, 2, 1, 0]


async def test_what_is_lost_is_counted() -> None:
    async with spilling(FakeBackend()) as (memory, spiller):
        spiller.count_lost(memory.put(1).chunk)
        assert memory.tier.counters.skipped_objects == 1
