"""A storage in memory that fails when a test says so, and a tier over it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from kvwire.server.tiers.backends.base import Entry, Full, NotFound, Place, Room, WrongSize, checked, total
from kvwire.server.tiers.settings import TierSettings
from kvwire.server.tiers.threads import Threads
from kvwire.server.tiers.tier import Tier


class FakeBackend:
    """`errors[call]` are raised one after the other. `gates[call]` hold calls until they are set."""

    scheme = "fake"
    max_size = 1 << 40

    def __init__(self, values: dict[str, bytes] | None = None) -> None:
        self.values = {} if values is None else values
        self.errors: dict[str, list[Exception]] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.calls: Counter[str] = Counter()
        self.closed = False
        self.room_bytes = 1 << 40

    async def open(self) -> None:
        await self._enter("open")

    async def write(self, name, parts) -> None:
        await self._enter("write")
        if self.stored_bytes + total(parts) > self.room_bytes:
            raise Full("no space left")
        self.values[checked(name)] = b"".join(bytes(part) for part in parts)

    async def read(self, name, parts) -> None:
        await self._enter("read")
        value = self.values.get(name)
        if value is None:
            raise NotFound(name)
        if len(value) != total(parts):
            raise WrongSize(name)
        for part in parts:
            part[:], value = value[: len(part)], value[len(part) :]

    async def delete(self, names) -> None:
        await self._enter("delete")
        for name in names:
            self.values.pop(name, None)

    async def list(self, prefix=""):
        await self._enter("list")
        names = sorted(name for name in self.values if name.startswith(prefix))
        for start in range(0, len(names), 3):
            yield [Entry(name, len(self.values[name])) for name in names[start : start + 3]]

    async def room(self) -> Room:
        return Room()

    async def close(self) -> None:
        self.closed = True

    @property
    def stored_bytes(self) -> int:
        return sum(len(value) for value in self.values.values())

    async def _enter(self, call: str) -> None:
        self.calls[call] += 1
        await asyncio.sleep(0)
        if call in self.gates:
            await self.gates[call].wait()
        if self.errors.get(call):
            raise self.errors[call].pop(0)


class Heard:
    """A listener of an index."""

    def __init__(self) -> None:
        self.log: list[tuple[str, bytes]] = []

    def on_stored(self, chunk) -> None:
        self.log.append(("store", chunk.key))

    def on_removed(self, chunk) -> None:
        self.log.append(("delete", chunk.key))

    def on_cleared(self) -> None:
        self.log.append(("clear", b""))

    def take(self) -> list[tuple[str, bytes]]:
        taken, self.log = self.log, []
        return taken


def settings(size: int = 1 << 20, **fields) -> TierSettings:
    return TierSettings(name="fake", place=Place("fake", "here"), size=size, **fields)


@contextlib.asynccontextmanager
async def open_tier(
    backend: FakeBackend,
    size: int = 1 << 20,
    *,
    heard: Heard | None = None,
    vault=None,
    patience: float = 5,
):
    """A tier that runs, opened unless `open` fails."""
    threads = Threads(1, "kvwire-test")
    tier = Tier(settings(size), backend, "server", threads, vault=vault, listener=heard or Heard())
    running = None
    try:
        await tier.start(patience)
        running = asyncio.create_task(tier.run())
        await asyncio.sleep(0.001)
        yield tier
    finally:
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await tier.close()
        threads.close()


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - a test looks from outside
            await asyncio.sleep(0)


async def settled(tier: Tier) -> None:
    """Until everything that is to be deleted has gone."""
    await until(lambda: not tier.index.doomed)
