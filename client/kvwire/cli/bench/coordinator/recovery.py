"""From a fault until the directory is whole again: it has what servers hold, and every feed is current."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from kvwire.cli.bench import stats
from kvwire.cli.bench.coordinator import wire
from kvwire.cli.bench.coordinator.servers import RECONNECT, SimServer, together, until
from kvwire.cli.bench.coordinator.target import Target, coordinator
from kvwire.cli.bench.echo import OPTIONS
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import coordinator_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from kvwire.cli.bench.coordinator.plan import Plan

SERVERS: Final = 4
HEARTBEAT_S: Final = 0.2
EXPIRY_S: Final = 1.0
FLAGS: Final = (f"--heartbeat={HEARTBEAT_S}", f"--expire-after={EXPIRY_S}", "--silent-after=0.4")
CHECKPOINT_S: Final = 0.5


async def measure(plan: Plan, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    state = folder / "state"
    state.mkdir()
    with coordinator(folder, *FLAGS, name="heal") as target:
        async with _Fleet(plan, target, folder, "a") as fleet:
            faults = {
                "gap": fleet.gap,
                "server restart": fleet.restart,
                "expiry": fleet.expiry,
                "return of an expired server": fleet.back,
                "coordinator killed": fleet.killed,
            }
            found = {name: await _rounds(plan, name, fault, tell) for name, fault in faults.items()}
    kept = (*FLAGS, f"--state={state}", f"--checkpoint-interval={CHECKPOINT_S}")
    with coordinator(folder, *kept, name="kept") as target:
        async with _Fleet(plan, target, folder, "b") as fleet:
            name = "coordinator killed, with checkpoint"
            found[name] = await _rounds(plan, name, fleet.killed_with_checkpoint, tell)
    return {
        "servers": SERVERS,
        "keys_per_server": plan.healed_keys,
        "heartbeat_s": HEARTBEAT_S,
        "expire_after_s": EXPIRY_S,
        "whole_ms": found,
    }


async def _rounds(
    plan: Plan, name: str, fault: Callable[[], Awaitable[float]], tell: Callable[[str], None]
) -> dict[str, float]:
    tell(f"time to whole: {name}")
    seconds = [await fault() for _ in range(plan.heal_rounds)]
    return {"median": round(stats.median(seconds) * 1e3, 1), "max": round(max(seconds) * 1e3, 1)}


class _Fleet:
    def __init__(self, plan: Plan, target: Target, folder: Path, prefix: str) -> None:
        self._plan, self._target = plan, target
        self.servers = [
            SimServer(f"{prefix}-{number}", target.address, folder, HEARTBEAT_S) for number in range(SERVERS)
        ]
        self._stack = AsyncExitStack()
        self._seed = 50_000

    async def __aenter__(self) -> Self:
        self._channel = await self._stack.enter_async_context(
            grpc.aio.insecure_channel(self._target.address, (*OPTIONS, *RECONNECT))
        )
        self._stub: Any = coordinator_service_pb2_grpc.CoordinatorServiceStub(self._channel)
        for server in self.servers:
            await self._stack.enter_async_context(server)
            server.keys, server.disk = [self._keys()], [self._keys(self._plan.healed_keys // 10)]
        await together(*(server.join() for server in self.servers))
        await until(self.whole)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def whole(self) -> bool:
        try:
            counts = await self._stub.GetDirectoryStats(pb.GetDirectoryStatsRequest(), timeout=5)
            listed = await self._stub.ListServers(pb.ListServersRequest(), timeout=5)
        except grpc.aio.AioRpcError:
            return False
        held = sum(keys.count for server in self.servers for keys in (*server.keys, *server.disk))
        current = [member.reporting == pb.REPORTING_STATE_CURRENT for member in listed.members]
        return counts.placements == held and len(current) == SERVERS and all(current)

    async def gap(self) -> float:
        """A batch is lost, and the next one arrives."""
        server = self.servers[0]
        lost, following = self._keys(wire.BATCH), self._keys(wire.BATCH)
        server.keys += [lost, following]
        server.sequence += 1
        raw = server.next_batch(following.batch(0))
        return await self._timed(server.send([raw]))

    async def restart(self) -> float:
        """A new run of a server registers: its memory is gone, its L2 is there."""
        server = self.servers[1]
        seconds = await self._timed(server.restart())
        await server.store(self._keys())
        await until(self.whole)
        return seconds

    async def expiry(self) -> float:
        """From the last life sign until nothing of its memory is told any more."""
        server = self.servers[2]
        key = server.keys[0].batch(0)[: wire.KEY_BYTES]
        ask = pb.LocateChunksRequest(chunk_keys=pb.LocateKeys(keys=[key]))

        async def unheard() -> bool:
            return not (await self._stub.LocateChunks(ask)).servers

        await server.silence()
        await until(unheard)
        seconds = time.perf_counter() - server.beat_at
        await server.join()
        await until(self.whole)
        return seconds

    async def back(self) -> float:
        """It was only away, and what it holds is still there."""
        server = self.servers[2]

        async def left() -> bool:
            listed = await self._stub.ListServers(pb.ListServersRequest())
            return len(listed.members) < SERVERS

        await server.silence()
        await until(left)
        return await self._timed(server.join())

    async def killed(self) -> float:
        """kill -9 and a new process at once, so its start counts."""

        async def again() -> None:
            self._target.kill()
            self._target.start(wait=False)

        return await self._timed(again())

    async def killed_with_checkpoint(self) -> float:
        await asyncio.sleep(3 * CHECKPOINT_S)
        return await self.killed()

    async def _timed(self, work: Awaitable[object]) -> float:
        started = time.perf_counter()
        await work
        await until(self.whole)
        return time.perf_counter() - started

    def _keys(self, count: int = 0) -> wire.Keys:
        self._seed += 1
        return wire.Keys(self._seed * 1000 + os.getpid(), count or self._plan.healed_keys)
