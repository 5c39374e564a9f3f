"""The memory tier's memory: an arena that grows ahead of its use."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from kvwire.errors import OutOfSpace
from kvwire.server.store import ExtentAllocator
from kvwire.transfer.shm import PrivateArena, SharedArena, sweep_dead

if TYPE_CHECKING:
    from kvwire.server.config import ServerConfig
    from kvwire.transfer.arena import GrowingArena

log = logging.getLogger("kvwire.server")

AHEAD: Final = 256 << 20
"""Bytes to have allocated beyond what is in use, so that no request waits for the kernel."""


def make_arena(config: ServerConfig, incarnation: bytes) -> SharedArena | PrivateArena:
    """The arena, empty. What killed servers left in shared memory goes first. Raises ConfigError."""
    if config.arena == "private" or "shm" not in config.data_paths:
        return PrivateArena.create(config.l1_size)
    for name in sweep_dead():
        log.info("removed shared memory %s of a server that is gone", name)
    return SharedArena.create(config.l1_size, incarnation=incarnation)


class BackedAllocator(ExtentAllocator):
    """Hands out only what has memory behind it: touching more could kill whoever does."""

    def __init__(self, arena: GrowingArena) -> None:
        super().__init__(arena.capacity, base=arena.base)
        self.arena = arena
        self.top = arena.base
        self.grew = asyncio.Event()

    def allocate(self, size: int) -> int | None:
        offset = super().allocate(size)
        if offset is None or offset + size <= self.top:
            return offset
        try:
            self.arena.ensure(offset + size)
        except OutOfSpace as error:
            log.warning("%s", error)
            self.free(offset)
            return None
        self.top = offset + size
        self.grew.set()
        return offset


async def grow_ahead(allocator: BackedAllocator) -> None:
    """Keep memory allocated beyond what is in use. Runs for ever."""
    arena, loop = allocator.arena, asyncio.get_running_loop()
    with ThreadPoolExecutor(1, "kvwire-grow") as pool:
        while True:
            target = min(arena.size, allocator.top + AHEAD)
            try:
                await loop.run_in_executor(pool, arena.ensure, target)
            except OutOfSpace as error:
                log.warning("%s", error)
            await allocator.grew.wait()
            allocator.grew.clear()
