"""Storages that are away, silent, full, or not for us."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import shutil
import stat
import subprocess
from dataclasses import replace

import pytest
import trustme

from kvwire.errors import ConfigError
from kvwire.server.tiers.backends import make_backend
from kvwire.server.tiers.backends.base import (
    Full,
    NotFound,
    Place,
    Refused,
    Unavailable,
    WrongSize,
)
from support.proxy import TcpProxy
from support.redis_server import free_port, redis_server
from support.storages import REMOTE, listed, opened, place_of, read, servers, through

__all__ = ["place_of", "servers"]

pytestmark = [pytest.mark.asyncio, pytest.mark.leakcheck("threads", "tasks")]
remote = pytest.mark.parametrize("kind", REMOTE)


TLS_FILES = {"ca-cert": "ca.pem", "key": "key.pem", "cert": "cert.pem"}


def calls(backend):
    """One of each, to be awaited."""
    yield backend.write("a/b", [b"x" * 100])
    yield read(backend, "a/b", 100)
    yield backend.delete(["a/b"])
    yield listed(backend)


async def stalled(proxy: TcpProxy) -> None:
    for _ in range(1000):
        if proxy.stalled:
            return
        await asyncio.sleep(0.01)
    pytest.fail("nothing flows through the proxy")


async def eventually_works(call, *args):
    while True:
        try:
            return await call(*args)
        except Unavailable:
            await asyncio.sleep(0.02)


@remote
async def test_nobody_there_is_unavailable(kind, place_of):
    backend = make_backend(place_of(kind, through=f"127.0.0.1:{free_port()}", timeout=2.0))
    with pytest.raises(Unavailable):
        await backend.open()
    for call in calls(backend):
        with pytest.raises(Unavailable):
            await call
    await backend.close()


@remote
async def test_silence_is_unavailable_in_time_and_works_again_afterwards(kind, place_of, servers):
    with TcpProxy(servers(kind).address) as proxy:
        async with opened(place_of(kind, through=proxy.address, timeout=0.4)) as backend:
            await backend.write("a/b", [b"0" * 100])
            proxy.stall()
            results = await asyncio.gather(*calls(backend), return_exceptions=True)
            assert [type(result) for result in results] == [Unavailable] * 4
            proxy.cut()
            proxy.heal()
            await eventually_works(backend.write, "a/b", [b"1" * 100])
            assert await read(backend, "a/b", 100) == b"1" * 100


@remote
async def test_a_read_that_stalls_in_the_middle_is_unavailable(kind, place_of, servers):
    size = 8 << 20
    place = place_of(kind)
    async with opened(place) as direct:
        await direct.write("a/b", [os.urandom(size)])
    with TcpProxy(servers(kind).address) as proxy:
        slow = replace(through(place, proxy.address), timeout=0.5)
        async with opened(slow) as backend:
            proxy.stall_after(1 << 20)
            into = bytearray(size)
            reading = asyncio.create_task(backend.read("a/b", [memoryview(into)]))
            if kind == "redis":  # it cannot tell how far it is, and gives every MiB a second
                await stalled(proxy)
                await asyncio.sleep(0.05)
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
            else:
                with pytest.raises(Unavailable):
                    await reading
            there = bytes(into)
            proxy.heal()
            await asyncio.sleep(0.1)
            assert into == there


@remote
async def test_a_connection_that_breaks_in_the_middle_is_unavailable_and_comes_back(kind, place_of, servers):
    with TcpProxy(servers(kind).address) as proxy:
        async with opened(place_of(kind, through=proxy.address)) as backend:
            proxy.stall_after(1 << 20)
            writing = asyncio.create_task(backend.write("a/b", [b"x" * (16 << 20)]))
            await stalled(proxy)
            proxy.cut()
            proxy.heal()
            with contextlib.suppress(Unavailable):  # valkey-glide may have sent it again by itself
                await writing
            found = await eventually_works(listed, backend)
            assert found in ({}, {"a/b": 16 << 20})
            await eventually_works(backend.write, "a/b", [b"y" * 10])
            assert await read(backend, "a/b", 10) == b"y" * 10


async def test_redis_that_restarts_is_found_again_empty(place_of):
    with redis_server() as first:
        async with opened(place_of("redis", through=first.address, timeout=2.0)) as backend:
            await backend.write("a/b", [b"x"])
            first.process.kill()
            first.process.wait(10)
            with pytest.raises(Unavailable):
                await read(backend, "a/b", 1)
            with redis_server(port=first.port):
                with pytest.raises(NotFound):
                    await eventually_works(read, backend, "a/b", 1)
                await backend.write("a/b", [b"y"])
                assert await read(backend, "a/b", 1) == b"y"


async def test_redis_that_is_full_says_so_and_what_it_evicts_is_not_found(place_of):
    with redis_server("--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server:
        async with opened(place_of("redis", through=server.address)) as backend:
            writes = [backend.write(f"a/{number}", [bytes(1 << 20)]) for number in range(10)]
            results = await asyncio.gather(*writes, return_exceptions=True)
            stored = results.count(None)
            assert {type(result) for result in results if result} == {Full}
            assert len(await listed(backend)) == stored > 0
            room = await backend.room()
            assert room.used > stored << 20
            assert room.free == max(0, (8 << 20) - room.used)
            server.ask("config", "set", "maxmemory-policy", "allkeys-lru")
            for number in range(20):
                await backend.write(f"b/{number}", [bytes(1 << 20)])
            left = await listed(backend)
            assert 0 < len(left) < 8
            gone = next(f"b/{number}" for number in range(20) if f"b/{number}" not in left)
            with pytest.raises(NotFound):
                await read(backend, gone, 1 << 20)


async def test_redis_wants_its_password_from_the_environment(place_of, monkeypatch):
    with redis_server("--requirepass", "secret-word") as server:
        place = place_of("redis", through=server.address)
        await refused(place)
        monkeypatch.setenv("REDISCLI_AUTH", "wrong-word")
        error = await refused(place)
        assert "wrong-word" not in error
        monkeypatch.setenv("REDISCLI_AUTH", "secret-word")
        async with opened(place) as backend:
            await backend.write("a", [b"x"])
        monkeypatch.delenv("REDISCLI_AUTH")
        monkeypatch.setenv("CACHE_AUTH", "secret-word")
        async with opened(replace(place, options={"auth_env": "CACHE_AUTH"})) as backend:
            assert await read(backend, "a", 1) == b"x"
        monkeypatch.setenv("VALKEYCLI_AUTH", "secret-word")
        async with opened(replace(place, scheme="valkey")) as backend:
            assert await listed(backend) == {"a": 1}
        with pytest.raises(ConfigError, match="OTHER_AUTH"):
            make_backend(replace(place, options={"auth_env": "OTHER_AUTH"}))


async def test_a_redis_user_without_rights_is_refused(place_of, monkeypatch):
    with redis_server() as server:
        server.ask("acl", "setuser", "reader", "on", ">word", "~*", "+@connection", "+@read", "+info")
        monkeypatch.setenv("REDISCLI_AUTH", "word")
        place = replace(place_of("redis", through=server.address), options={"user": "reader"})
        async with opened(place) as backend:
            with pytest.raises(Refused):
                await backend.write("a", [b"x"])
            assert await listed(backend) == {}


async def test_redis_over_tls(place_of, tmp_path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    files = [(f"--tls-{what}-file", str(tmp_path / name)) for what, name in TLS_FILES.items()]
    flags = [word for pair in files for word in pair]
    with redis_server(*flags, "--tls-auth-clients", "no", tls=True) as server:
        plain = place_of("redis", through=server.address, timeout=2.0)
        trusting = replace(plain, options={"tls": "yes", "ca": str(tmp_path / "ca.pem")})
        async with opened(trusting) as backend:
            await backend.write("a", [bytes(1 << 20)])
            assert await read(backend, "a", 1 << 20) == bytes(1 << 20)
        for place in (plain, replace(plain, options={"tls": "yes"})):
            backend = make_backend(place)
            with pytest.raises((Unavailable, Refused)):
                await backend.open()
            await backend.close()
        with pytest.raises(ConfigError, match=r"nothing\.pem"):
            make_backend(replace(plain, options={"tls": "yes", "ca": str(tmp_path / "nothing.pem")}))
        with pytest.raises(ConfigError, match="tls"):
            make_backend(replace(plain, options={"tls": "maybe"}))


async def test_a_bucket_that_does_not_exist_is_refused(place_of):
    place = replace(place_of("s3"), location="nobody-has-this-bucket")
    assert "NoSuchBucket" in await refused(place)
    backend = make_backend(place)
    with pytest.raises(Refused):
        await backend.write("a/b", [b"x"])
    await backend.close()


async def test_s3_keeps_nothing_of_a_write_that_was_given_up(place_of, servers):
    server = servers("s3")
    with TcpProxy(server.address) as proxy:
        place = place_of("s3", through=proxy.address)
        async with opened(place) as backend:
            proxy.stall_after(1 << 20)
            writing = asyncio.create_task(backend.write("a/b", [b"x" * (64 << 20)]))
            await stalled(proxy)
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
    assert not [name for name in server.names() if name.startswith(place.prefix)]
    assert server.uploads() == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    target = tmp_path / "small"
    target.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "kvwire-test", str(target)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small file system: {error}")
    yield target
    subprocess.run(["umount", str(target)], check=True)


async def test_bl49_a_full_disk_is_told_and_nothing_of_the_value_stays(small_disk):
    async with opened(Place("file", str(small_disk), "kv")) as backend:
        await backend.write("a/good", [bytes(256 << 10)])
        free = (await backend.room()).free
        for _ in range(2):
            with pytest.raises(Full):
                await backend.write("a/large", [bytes(2 << 20)])
            assert await listed(backend) == {"a/good": 256 << 10}
            assert list((small_disk / "kv" / ".unfinished").iterdir()) == []
            assert (await backend.room()).free == free
        await backend.delete(["a/good"])
        await backend.write("a/next", [bytes(512 << 10)])
        assert await read(backend, "a/next", 512 << 10) == bytes(512 << 10)


async def test_bl49_a_limit_of_file_sizes_is_like_a_full_disk(place_of):
    async with opened(place_of("file")) as backend:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            with pytest.raises(Full):
                await backend.write("a/large", [bytes(6 << 20)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert await listed(backend) == {}
        assert list((backend.root / ".unfinished").iterdir()) == []


async def test_a_folder_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    place = Place("file", str(tmp_path), "kv")
    async with opened(place) as backend:
        await backend.write("a/b", [b"x"])
        monkeypatch.setattr(os, "open", denied)
        for call in (backend.write("a/c", [b"x"]), read(backend, "a/b", 1)):
            with pytest.raises(Refused):
                await call
        monkeypatch.undo()
        assert await listed(backend) == {"a/b": 1}
    (tmp_path / "file").write_bytes(b"")
    await refused(Place("file", str(tmp_path / "file"), "kv"))


async def test_a_folder_belongs_to_one_server(tmp_path):
    place = Place("file", str(tmp_path), "kv")
    async with opened(place) as first:
        second = make_backend(place)
        with pytest.raises(ConfigError, match="another server"):
            await second.open()
        await second.close()
        await first.open()
        async with opened(Place("file", str(tmp_path), "other")):
            pass
    async with opened(place):
        pass


async def test_what_lies_in_a_folder_is_for_its_owner_alone(tmp_path):
    async with opened(Place("file", str(tmp_path / "kv"))) as backend:
        await backend.write("a/b", [b"x"])
    paths = [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o700, 0o600}


async def test_a_folder_that_vanishes_can_be_written_later(tmp_path, monkeypatch):
    async with opened(Place("file", str(tmp_path), "kv")) as backend:
        monkeypatch.setattr(os, "open", vanished)
        with pytest.raises(Unavailable):
            await backend.write("a/b", [b"x"])
        monkeypatch.undo()
        await backend.write("a/b", [b"x"])
        assert await listed(backend) == {"a/b": 1}


async def test_a_folder_that_somebody_clears_can_be_written_again(tmp_path):
    async with opened(Place("file", str(tmp_path), "kv")) as backend:
        await backend.write("a/b", [b"x"])
        shutil.rmtree(tmp_path / "kv" / "a")
        shutil.rmtree(tmp_path / "kv" / ".unfinished")
        with pytest.raises(NotFound):
            await read(backend, "a/b", 1)
        assert await listed(backend) == {}
        await backend.write("a/b", [b"y"])
        assert await read(backend, "a/b", 1) == b"y"


async def test_what_others_put_into_a_folder_is_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    async with opened(Place("file", str(tmp_path), "kv")) as backend:
        (tmp_path / "kv" / "link").symlink_to(tmp_path / "secret")
        (tmp_path / "kv" / "loop").symlink_to(tmp_path / "kv")
        os.mkfifo(tmp_path / "kv" / "pipe")
        (tmp_path / "kv" / "folder").mkdir()
        for name in ("link", "pipe", "folder"):
            with pytest.raises((Refused, WrongSize)):
                await read(backend, name, 6)
        assert await listed(backend) == {}
        await backend.write("link", [b"own"])
        assert (tmp_path / "secret").read_bytes() == b"secret"
        assert await listed(backend) == {"link": 3}


async def test_folders_whose_values_are_gone_go_at_the_next_start(tmp_path):
    place = Place("file", str(tmp_path), "kv")
    async with opened(place) as backend:
        await backend.write("a/b/c", [b"x"])
        await backend.write("d/e", [b"x"])
        await backend.delete(["a/b/c"])
    async with opened(place) as backend:
        assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == [".lock", ".unfinished", "d"]
        await backend.write("a/b/c", [b"x"])


async def test_options_that_a_scheme_does_not_know_are_refused():
    with pytest.raises(ConfigError, match="colour"):
        make_backend(Place("redis", "localhost:1", options={"colour": "red"}))
    for location in ("host:port", "host:99999", "[::1"):
        with pytest.raises(ConfigError):
            make_backend(Place("redis", location))
    for location in ("host", "[::1]", "[::1]:1"):
        await make_backend(Place("redis", location)).close()
    with pytest.raises(ConfigError, match="ftp"):
        make_backend(Place("ftp", "localhost:1"))


def vanished(path, *_args, **_kwargs):
    raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))


def denied(path, *_args, **_kwargs):
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


async def refused(place: Place) -> str:
    backend = make_backend(place)
    with pytest.raises(Refused) as caught:
        await backend.open()
    await backend.close()
    return str(caught.value)
