"""One lower tier over a storage that fails as told."""

from __future__ import annotations

import asyncio

import pytest

from kvwire.errors import ConfigError
from kvwire.server.tiers.backends.base import Refused, Unavailable
from kvwire.server.tiers.crypt import read_vault
from kvwire.server.tiers.tier import ReadFailed
from support.domain import OBJECT_BYTES
from support.tier_backend import FakeBackend, Heard, open_tier, settled, until
from support.tier_objects import data, get, key, put

pytestmark = pytest.mark.asyncio


async def test_what_was_written_is_read_also_by_the_next_run() -> None:
    backend, heard = FakeBackend(), Heard()
    async with open_tier(backend, heard=heard) as tier:
        assert await put(tier, 1)
        assert await put(tier, 2)
        assert await get(tier, 1) == data(1)
        assert heard.take() == [
            ("clear", b""),
            ("store", key(1)),
            ("store", key(2)),
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


async def test_bl49_a_failed_write_leaves_nothing_and_no_event() -> None:
    backend, heard = FakeBackend(), Heard()
    async with open_tier(backend, heard=heard) as tier:
        await put(tier, 1)
        heard.take()
        backend.errors["write"] = [Refused("denied")]
        assert not await put(tier, 2)
        assert tier.status().problem == "cannot be written to: denied"
        assert tier.counters.failed_writes == 1
        await settled(tier)
        assert heard.take() == []
        assert tier.index.used == backend.stored_bytes
        assert await put(tier, 3)
        assert tier.status().problem == ""


async def test_bl49_a_disk_that_is_full_before_its_size_takes_what_is_new(monkeypatch) -> None:
    backend, heard = FakeBackend(), Heard()
    async with open_tier(backend, heard=heard) as tier:
        backend.room_bytes = 4096 + 4 * (OBJECT_BYTES + 64) + 10
        for number in range(9):
            assert await put(tier, number)
        await settled(tier)
        assert sorted(int.from_bytes(chunk.key, "big") for chunk in tier.index) == [5, 6, 7, 8]
        assert tier.index.used == backend.stored_bytes
        assert (tier.counters.failed_writes, tier.status().problem) == (0, "")
        # Others take what is left: it gives way, and what has no room is a miss and never told.
        backend.room_bytes = 10
        heard.take()
        for number in range(10, 14):
            assert not await put(tier, number)
        await settled(tier)
        assert all(kind != "store" for kind, _ in heard.take())
        assert tier.index.used == backend.stored_bytes
        assert tier.status().problem == "cannot be written to: no space left"
        # When it was full long ago, it is tried up to its size again.
        backend.room_bytes = 1 << 30
        monkeypatch.setattr(tier._fill, "_now", lambda: 1e12)
        for number in range(20, 30):
            assert await put(tier, number)
        assert len(tier.index) == 10
        tier.index.check_integrity()


async def test_what_is_too_large_for_the_storage_is_skipped() -> None:
    backend = FakeBackend()
    backend.max_size = OBJECT_BYTES
    async with open_tier(backend) as tier:
        assert not await put(tier, 1)
        assert (tier.counters.skipped_objects, tier.status().problem) == (1, "")


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
        assert heard.take() == [("delete", key(1))]
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
        chunk = tier.index.get(key(1))
        old = chunk.generation(0)
        tier.index.evict([chunk.key])
        await put(tier, 1)
        assert not tier.index.drop_object(chunk, 0, old)
        newer = tier.index.get(chunk.key)
        assert newer is not chunk
        assert await get(tier, 1) == data(1)


async def test_a_storage_that_is_away_at_the_start_is_taken_up_when_it_comes(monkeypatch) -> None:
    backend, heard = FakeBackend(), Heard()
    async with open_tier(backend) as tier:
        await put(tier, 1)
    monkeypatch.setattr("kvwire.server.tiers.tier.FIRST_RETRY_S", 0.05)
    backend.errors["open"] = [Unavailable("away"), Unavailable("away")]
    backend.errors["list"] = [Unavailable("gone again")]
    async with open_tier(backend, heard=heard) as tier:
        assert not tier.ready
        assert tier.status().problem == "cannot be used: away"
        assert not await put(tier, 2)
        ready = asyncio.Event()
        tier.on_ready = ready.set
        await asyncio.wait_for(ready.wait(), 10)
        assert tier.status().problem == ""
        assert heard.take() == [("clear", b""), ("store", key(1))]
        assert await get(tier, 1) == data(1)
        tier.index.check_integrity()


async def test_a_storage_that_is_slow_at_the_start_does_not_hold_the_server_up() -> None:
    backend, heard = FakeBackend(), Heard()
    gate = backend.gates["open"] = asyncio.Event()
    async with open_tier(backend, heard=heard, patience=0.01) as tier:
        assert tier.status().problem == "cannot be used: it has not told yet what it holds"
        gate.set()
        await until(lambda: tier.ready)
        assert tier.status().problem == ""


async def test_a_folder_of_another_server_ends_the_start() -> None:
    backend = FakeBackend()
    backend.errors["open"] = [ConfigError("--l2: another server uses the folder")]
    with pytest.raises(ConfigError):
        async with open_tier(backend):
            pass
    assert backend.closed


async def test_what_is_of_no_use_is_deleted_at_the_start() -> None:
    backend, heard = FakeBackend(), Heard()
    async with open_tier(backend, heard=heard) as tier:
        for number in range(4):
            await put(tier, number)
        folder = next(iter(tier.index.spaces))
    heard.take()
    cut = f"{folder}/{key(1).hex()}.0"
    backend.values[cut] = backend.values[cut][:-1]
    backend.values[f"{folder}/{key(9).hex()}.7"] = backend.values[f"{folder}/{key(2).hex()}.0"]
    lost = folder[:-1] + ("0" if folder[-1] != "0" else "1")
    backend.values[f"{lost}/{key(1).hex()}.0"] = b"no manifest beside it"
    backend.values[f"{lost[:-1]}x/note"] = b"of somebody else"
    async with open_tier(backend, heard=heard) as tier:
        await settled(tier)
        assert sorted(heard.take()) == [("clear", b""), *(("store", key(number)) for number in (0, 2, 3))]
        assert sorted(backend.values) == sorted(
            [f"{folder}/manifest", *(f"{folder}/{key(n).hex()}.0" for n in (0, 2, 3)), f"{lost[:-1]}x/note"]
        )
        assert tier.index.used == backend.stored_bytes - len(b"of somebody else")


async def test_a_smaller_size_at_the_next_start_drops_what_is_too_much() -> None:
    backend = FakeBackend()
    async with open_tier(backend) as tier:
        for number in range(8):
            await put(tier, number)
        size = tier.index.used - 3 * (OBJECT_BYTES + 64)
    async with open_tier(backend, size) as tier:
        await settled(tier)
        assert len(tier.index) == 5
        assert tier.index.used == backend.stored_bytes <= size


@pytest.mark.parametrize("manifest", [b"", b"{}", b"\xff" * 4096, b"{}".ljust(4096), b"[1]".ljust(8192)])
async def test_a_damaged_manifest_takes_its_objects_along(manifest: bytes) -> None:
    backend = FakeBackend()
    async with open_tier(backend) as tier:
        await put(tier, 1)
        name = f"{next(iter(tier.index.spaces))}/manifest"
    backend.values[name] = manifest
    async with open_tier(backend) as tier:
        await settled(tier)
        assert (len(tier.index), backend.values) == (0, {})
        assert await put(tier, 1)
        assert await get(tier, 1) == data(1)
    async with open_tier(backend) as tier:
        assert await get(tier, 1) == data(1)


async def test_room_is_there_before_it_is_written_to() -> None:
    backend = FakeBackend()
    async with open_tier(backend) as tier:
        await put(tier, 1)
        tier.index.capacity = tier.index.used
        gate = backend.gates["delete"] = asyncio.Event()
        writing = asyncio.create_task(put(tier, 2))
        await until(lambda: backend.calls["delete"])
        await asyncio.sleep(0.01)
        assert not any(name.endswith("2.0") for name in backend.values)
        gate.set()
        assert await writing
        assert tier.index.used == backend.stored_bytes <= tier.index.capacity


async def test_what_cannot_be_deleted_stays_accounted_and_is_tried_again() -> None:
    backend = FakeBackend()
    async with open_tier(backend) as tier:
        await put(tier, 1)
        before = tier.index.used
        backend.errors["delete"] = [Unavailable("away")]
        tier.index.clear()
        await until(lambda: backend.calls["delete"])
        await asyncio.sleep(0)
        assert tier.index.used == before == backend.stored_bytes
        assert tier.status().problem == "cannot be deleted from: away"
        await settled(tier)
        assert (tier.index.used, backend.values) == (0, {})


async def test_a_write_that_was_cancelled_is_not_there() -> None:
    backend, heard = FakeBackend(), Heard()
    async with open_tier(backend, heard=heard) as tier:
        await put(tier, 1)
        heard.take()
        gate = backend.gates["write"] = asyncio.Event()
        writing = asyncio.create_task(put(tier, 2))
        await until(lambda: backend.calls["write"] == 3)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        gate.set()
        await settled(tier)
        assert tier.index.get(key(2)) is None
        assert heard.take() == []
        assert tier.index.used == backend.stored_bytes
        tier.index.check_integrity()


async def test_a_chunk_is_written_again_while_its_former_bytes_are_being_deleted() -> None:
    backend = FakeBackend()
    async with open_tier(backend) as tier:
        await put(tier, 1)
        gate = backend.gates["delete"] = asyncio.Event()
        tier.index.evict([key(1)])
        writing = asyncio.create_task(put(tier, 1))
        await asyncio.sleep(0.01)
        assert not writing.done()
        gate.set()
        assert await writing
        await settled(tier)
        assert await get(tier, 1) == data(1)
        assert tier.index.used == backend.stored_bytes


async def test_many_writers_of_a_new_namespace_write_one_manifest() -> None:
    backend = FakeBackend()
    async with open_tier(backend) as tier:
        assert all(await asyncio.gather(*(put(tier, number) for number in range(6))))
        assert backend.calls["write"] == 7
        tier.index.check_integrity()


async def test_an_encrypted_tier_of_another_key_is_a_miss(tmp_path) -> None:
    backend = FakeBackend()

    def vault(byte: bytes):
        path = tmp_path / byte.hex()
        path.write_bytes(byte * 32)
        path.chmod(0o600)
        return read_vault(str(path))

    async with open_tier(backend, vault=vault(b"a")) as tier:
        await put(tier, 1)
        assert await get(tier, 1) == data(1)
        assert tier.index.used == backend.stored_bytes
        assert data(1)[:64] not in b"".join(backend.values.values())
    async with open_tier(backend, vault=vault(b"b")) as tier:
        with pytest.raises(ReadFailed, match="encrypted with another key"):
            await get(tier, 1)
        assert "encrypted with another key" in tier.status().problem
        await settled(tier)
        assert await put(tier, 1)
        assert await get(tier, 1) == data(1)
    async with open_tier(backend) as tier:
        await settled(tier)
        assert len(tier.index) == 0
