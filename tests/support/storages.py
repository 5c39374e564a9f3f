"""Storages for tests of what lies below the memory: one of every kind, each test with a prefix of its own."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from kvwire.server.tiers.backends import make_backend
from kvwire.server.tiers.backends.base import Place
from support.redis_server import redis_server
from support.s3_server import BUCKET, KEYS, s3_server

LOCAL = ("memory", "file")
REMOTE = ("s3", "redis")
KINDS = (*LOCAL, *REMOTE)

prefixes = itertools.count()


@pytest.fixture(scope="module")
def servers():
    """Started when a test of this module first needs them: `servers(kind)`."""
    with contextlib.ExitStack() as stack:
        running = {}

        def get(kind: str):
            if kind not in running:
                running[kind] = stack.enter_context(s3_server() if kind == "s3" else redis_server())
            return running[kind]

        yield get


@pytest.fixture
def place_of(servers, tmp_path, monkeypatch):
    """`place_of(kind)`: a new, empty place. `through` is a proxy's HOST:PORT, `timeout` in seconds."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)

    def make(kind: str, *, through: str = "", timeout: float = 10.0) -> Place:
        prefix = f"t{next(prefixes)}"
        if kind == "file":
            return Place("file", str(tmp_path), prefix, timeout=timeout)
        if kind == "memory":
            return Place("memory", "", prefix, timeout=timeout)
        address = through or servers(kind).address
        if kind == "s3":
            endpoint = f"http://{address}"
            return Place("s3", BUCKET, prefix, endpoint=endpoint, region="us-east-1", timeout=timeout)
        return Place(kind, address, prefix, timeout=timeout)

    return make


def through(place: Place, address: str) -> Place:
    """The same place, reached at another HOST:PORT."""
    if place.scheme == "s3":
        return replace(place, endpoint=f"http://{address}")
    return replace(place, location=address)


@contextlib.asynccontextmanager
async def opened(place: Place):
    backend = make_backend(place)
    try:
        await backend.open()
        yield backend
    finally:
        await backend.close()


async def listed(backend, prefix: str = "") -> dict[str, int]:
    """Everything; a name that is told twice is a fault."""
    found: dict[str, int] = {}
    async for page in backend.list(prefix):
        for entry in page:
            assert entry.name not in found
            found[entry.name] = entry.size
    return found


async def read(backend, name: str, size: int) -> bytes:
    into = bytearray(size)
    await backend.read(name, [memoryview(into)])
    return bytes(into)


WRITER = """
import asyncio, os, sys
from kvwire.server.tiers.backends import make_backend
from kvwire.server.tiers.backends.base import Place

pwritev, calls = os.pwritev, []

def stalling(file, buffers, at):
    calls.append(at)
    if len(calls) == 3:
        print("in the middle", flush=True)
        sys.stdin.read()
    return pwritev(file, buffers, at)

os.pwritev = stalling

async def main():
    backend = make_backend(Place(**eval(sys.argv[1])))
    await backend.open()
    print("writing", flush=True)
    await backend.write(sys.argv[2], [b"x" * int(sys.argv[3])])

asyncio.run(main())
"""


@contextlib.contextmanager
def writer(place: Place, name: str, size: int):
    """A process that writes one value; into a folder it stops in the middle and says so."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, repr(asdict(place)), name, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline().strip() == "writing"
        yield process
    finally:
        process.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()
