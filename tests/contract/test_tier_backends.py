"""What every storage below the memory has to keep: folders, memory, S3 (moto) and Redis (a real one)."""

from __future__ import annotations

import asyncio
import contextlib
import os

import pytest

from kvwire.server.tiers.backends import objects
from kvwire.server.tiers.backends.base import NotFound, Refused, Unavailable, WrongSize
from support.proxy import TcpProxy
from support.storages import KINDS, listed, opened, place_of, read, servers, through, writer
from support.waiting import eventually

__all__ = ["place_of", "servers"]

pytestmark = [pytest.mark.asyncio, pytest.mark.leakcheck("threads", "tasks")]
every = pytest.mark.parametrize("kind", KINDS)


@every
async def test_what_was_written_is_read_in_any_division(kind, place_of):
    async with opened(place_of(kind)) as backend:
        head, body = os.urandom(64), os.urandom(1 << 20)
        await backend.write("ab/cd.0", [head, memoryview(body), b"", bytearray(b"end")])
        whole = head + body + b"end"
        into = [bytearray(1), bytearray(70_000), bytearray(0), bytearray(len(whole) - 70_001)]
        await backend.read("ab/cd.0", [memoryview(part) for part in into])
        assert b"".join(into) == whole
        assert await listed(backend) == {"ab/cd.0": len(whole)}


@every
async def test_a_value_may_be_empty_or_large(kind, place_of):
    async with opened(place_of(kind)) as backend:
        large = os.urandom(64 << 20)
        await asyncio.gather(backend.write("empty", []), backend.write("a/large", [large[:5], large[5:]]))
        assert await read(backend, "empty", 0) == b""
        assert await read(backend, "a/large", len(large)) == large
        assert await listed(backend) == {"empty": 0, "a/large": 64 << 20}


@every
async def test_what_is_not_there_is_not_found(kind, place_of):
    async with opened(place_of(kind)) as backend:
        assert await listed(backend) == {}
        assert await listed(backend, "a/") == {}
        with pytest.raises(NotFound):
            await read(backend, "a/b", 10)
        await backend.write("a/b", [b"x"])
        with pytest.raises(NotFound):
            await read(backend, "a/b.1", 1)
        with pytest.raises(NotFound):
            await read(backend, "b", 1)
        await backend.delete(["a/b", "a/c", "nowhere/at/all"])
        with pytest.raises(NotFound):
            await read(backend, "a/b", 1)
        await backend.delete(["a/b"])
        await backend.delete([])
        assert await listed(backend) == {}


@every
async def test_bl49_another_length_is_told_and_nothing_else_touched(kind, place_of):
    async with opened(place_of(kind)) as backend:
        await backend.write("a", [b"0123456789"])
        for size in (0, 9, 11, 1 << 20):
            around = bytearray(b"-" * (size + 2))
            with pytest.raises(WrongSize):
                await backend.read("a", [memoryview(around)[1 : size + 1]])
            assert around[:1] + around[-1:] == b"--"
        assert await read(backend, "a", 10) == b"0123456789"


@every
async def test_listings_come_in_pages(kind, place_of, monkeypatch):
    """Of moto, which is slow, in smaller ones."""
    monkeypatch.setattr(objects, "PAGE", 40)
    names = [f"ns{n % 3}/{n:04}.0" for n in range(1100 if kind in {"file", "redis"} else 100)]
    async with opened(place_of(kind)) as backend:
        for start in range(0, len(names), 50):
            await asyncio.gather(*(backend.write(name, [b"x" * 7]) for name in names[start : start + 50]))
        pages = [page async for page in backend.list()]
        assert len(pages) > 1
        assert await listed(backend) == dict.fromkeys(names, 7)
        inside = {name: 7 for name in names if name.startswith("ns1/")}
        assert await listed(backend, "ns1/") == inside
        assert await listed(backend, "ns/") == {}
        await backend.delete([name for name in names if not name.startswith("ns1/")])
        assert await listed(backend) == inside
        await backend.delete(list(inside))
        assert await listed(backend) == {}


@every
async def test_places_with_different_prefixes_do_not_see_each_other(kind, place_of):
    if kind == "memory":
        pytest.skip("each has a memory of its own")
    async with opened(place_of(kind)) as one, opened(place_of(kind)) as other:
        await one.write("a/b", [b"one"])
        assert await listed(other) == {}
        with pytest.raises(NotFound):
            await read(other, "a/b", 3)


@every
async def test_of_several_writers_of_one_name_one_wins_as_a_whole(kind, place_of):
    size = 1 << 20
    async with opened(place_of(kind)) as backend:
        await backend.write("a/b", [b"0" * size])
        done = asyncio.Event()

        async def write(letter: bytes) -> None:
            for _ in range(3):
                await until_done(backend.write, "a/b", [letter * (size // 2), letter * (size - size // 2)])

        async def look() -> None:
            while not done.is_set():
                found = await until_done(read, backend, "a/b", size)
                assert found == found[:1] * size

        looking = asyncio.create_task(look())
        await asyncio.gather(*(write(letter) for letter in (b"1", b"2", b"3", b"4")))
        done.set()
        await looking
        assert await listed(backend) == {"a/b": size}


async def until_done(call, *args):
    """As the tier does it: moto answers 500 to some of what happens at the same time."""
    while True:
        try:
            return await call(*args)
        except Unavailable:
            await asyncio.sleep(0.01)


BAD_NAMES = (
    "",
    "/a",
    "a/",
    "a//b",
    "..",
    "../a",
    "a/../b",
    ".a",
    "a/.b",
    "a b",
    "a\nb",
    "a\0",
    "ä",
    "a" * 201,
)


@every
async def test_bl50_names_that_some_storage_cannot_hold_are_refused(kind, place_of):
    async with opened(place_of(kind)) as backend:
        for name in BAD_NAMES:
            with pytest.raises(ValueError, match="no name"):
                await backend.write(name, [b"x"])
            with pytest.raises(ValueError, match="no name"):
                await read(backend, name, 1)
            with pytest.raises(ValueError, match="no name"):
                await backend.delete([name])
        assert await listed(backend) == {}


@every
async def test_bl19_a_writer_that_is_killed_in_the_middle_leaves_nothing(kind, place_of, tmp_path):
    if kind == "memory":
        pytest.skip("it goes with its process")
    place = place_of(kind)
    if kind == "file":
        with writer(place, "a/b", 64 << 20) as process:
            assert process.stdout.readline().strip() == "in the middle"
            process.kill()
            process.wait(10)
        assert any((tmp_path / place.prefix / ".unfinished").iterdir())
    else:
        address = place.endpoint.removeprefix("http://") or place.location
        with TcpProxy(address) as proxy, writer(through(place, proxy.address), "a/b", 64 << 20) as process:
            proxy.stall_after(1 << 20)
            eventually(lambda: proxy.stalled)
            process.kill()
            process.wait(10)
    async with opened(place) as backend:
        assert await listed(backend) == {}
        with pytest.raises(NotFound):
            await read(backend, "a/b", 64 << 20)
        if kind == "file":
            assert list((tmp_path / place.prefix / ".unfinished").iterdir()) == []
        await backend.write("a/b", [b"again"])
        assert await read(backend, "a/b", 5) == b"again"


@every
async def test_a_cancelled_read_touches_nothing_afterwards(kind, place_of):
    async with opened(place_of(kind)) as backend:
        await backend.write("a", [b"x" * (8 << 20)])
        into = bytearray(8 << 20)
        reading = asyncio.create_task(backend.read("a", [memoryview(into)]))
        await asyncio.sleep(0.002)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # it may have been faster
            await reading
        there = bytes(into)
        await asyncio.sleep(0.05)
        assert into == there
        assert await read(backend, "a", 8 << 20) == b"x" * (8 << 20)


@every
async def test_a_cancelled_write_may_change_its_buffer_afterwards(kind, place_of):
    size = 8 << 20
    async with opened(place_of(kind)) as backend:
        data = bytearray(b"x" * size)
        writing = asyncio.create_task(backend.write("a", [data]))
        await asyncio.sleep(0.002)
        writing.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # it may have been faster
            await writing
        data[:] = b"y" * size
        await asyncio.sleep(0.2)
        found = await listed(backend)
        assert found in ({}, {"a": size})
        if found:
            assert await read(backend, "a", size) == b"x" * size


@every
async def test_close_may_be_called_twice(kind, place_of):
    async with opened(place_of(kind)) as backend:
        await backend.room()
        await backend.close()


async def test_what_redis_cannot_hold_is_refused(place_of):
    async with opened(place_of("redis")) as backend:
        part = bytes(64 << 20)
        with pytest.raises(Refused):
            await backend.write("a", [part] * 8 + [b"x"])
        assert await listed(backend) == {}
