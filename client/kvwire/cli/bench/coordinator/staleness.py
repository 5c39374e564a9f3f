"""How often a hint fails at the owner: simulated owners know what they really hold.

An owner is an LRU cache under Zipf-like accesses: what is missed is stored, and something is evicted. Its
events leave in a batch every 20 ms, as a server's do, and `delay` later. Somebody asks the coordinator for
chunks of the same popularity, and looks at the owner when the answer is there.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import grpc
import numpy as np

from kvwire.cli.bench.coordinator import wire
from kvwire.cli.bench.coordinator.servers import SimServer, together
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import coordinator_service_pb2_grpc, event_pb2

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvwire.cli.bench.coordinator.plan import Plan
    from kvwire.cli.bench.coordinator.target import Target

CAPACITY: Final = 1000
UNIVERSE: Final = 10_000
ZIPF: Final = 0.9
EVENT_INTERVAL_S: Final = 0.02
STEP_S: Final = 0.002
ASK_S: Final = 0.025
ASK_KEYS: Final = 64
STORE, DELETE = event_pb2.CACHE_EVENT_KIND_STORE, event_pb2.CACHE_EVENT_KIND_DELETE


class Popularity:
    """Which of `size` chunks is asked for: the n-th with a weight of n ** -skew."""

    def __init__(self, size: int = UNIVERSE, skew: float = ZIPF, seed: int = 1) -> None:
        weights = np.arange(1, size + 1, dtype=float) ** -skew
        self._edges = np.cumsum(weights / weights.sum())
        self._random = np.random.default_rng(seed)

    def draw(self, count: int) -> list[int]:
        drawn = np.searchsorted(self._edges, self._random.random(count))
        return [int(each) for each in np.minimum(drawn, len(self._edges) - 1)]


@dataclass(slots=True)
class Owner:
    """An LRU cache of chunk numbers. `access` returns what was stored and evicted, in order."""

    capacity: int
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)
    evicted: int = 0

    def access(self, chunk: int) -> list[tuple[int, int]]:
        if chunk in self.held:
            self.held.move_to_end(chunk)
            return []
        changes: list[tuple[int, int]] = []
        if len(self.held) >= self.capacity:
            gone, _ = self.held.popitem(last=False)
            changes.append((DELETE, gone))
            self.evicted += 1
        self.held[chunk] = None
        return [*changes, (STORE, chunk)]


@dataclass(slots=True)
class Tally:
    """Answers by what was told and what was true. `failed`: told, and not there."""

    hints: int = 0
    failed: int = 0
    held: int = 0
    untold: int = 0

    def note(self, told: bool, true: bool) -> None:
        self.hints += told
        self.failed += told and not true
        self.held += true
        self.untold += true and not told


class _Cell:
    """One delay and one rate of eviction."""

    def __init__(self, server: SimServer, delay: float, churn: float, seed: int) -> None:
        self.server, self.delay, self.churn = server, delay, churn
        self.owner, self.tally = Owner(CAPACITY), Tally()
        self._popularity, self._asked = Popularity(seed=seed), Popularity(seed=seed + 1000)
        salt = os.urandom(24)
        self._keys = [salt + number.to_bytes(8, "big") for number in range(UNIVERSE)]
        self._open: list[tuple[int, bytes]] = []
        self.seconds = 0.0

    async def fill(self) -> float:
        """Accesses until the cache is full and warm; returns the share of accesses that evict."""
        for chunk in self._popularity.draw(10 * CAPACITY):
            self.owner.access(chunk)
        before = self.owner.evicted
        for chunk in self._popularity.draw(5 * CAPACITY):
            self.owner.access(chunk)
        share = (self.owner.evicted - before) / (5 * CAPACITY)
        await self.server.join()
        held = b"".join(self._keys[chunk] for chunk in self.owner.held)
        await self.server.store(wire.Keys(0, len(self.owner.held), held))
        self.server.keys = []
        return share

    async def run(self, seconds: float, coordinator: Any) -> None:
        rate = self.churn * CAPACITY / await self.fill()
        evicted, started = self.owner.evicted, time.monotonic()
        queue: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()
        work = (self._access(rate, seconds, queue), self._send(queue), self._ask(seconds, coordinator))
        await together(*work)
        self.churn = (self.owner.evicted - evicted) / CAPACITY / (time.monotonic() - started)

    async def _access(self, rate: float, seconds: float, queue: asyncio.Queue[Any]) -> None:
        started = closed = time.monotonic()
        done = 0
        while (now := time.monotonic()) - started < seconds:
            due = int(rate * (now - started)) - done
            for chunk in self._popularity.draw(due):
                self._open += [(kind, self._keys[each]) for kind, each in self.owner.access(chunk)]
            done += due
            if now - closed >= EVENT_INTERVAL_S and self._open:
                self._close(now, queue)
                closed = now
            await asyncio.sleep(STEP_S)
        await queue.put(None)

    def _close(self, now: float, queue: asyncio.Queue[Any]) -> None:
        server = self.server
        server.sequence += 1
        raw = wire.report(server.server_id, server.incarnation, server.sequence, wire.events_of(self._open))
        queue.put_nowait((now + self.delay, raw))
        self._open = []

    async def _send(self, queue: asyncio.Queue[tuple[float, bytes] | None]) -> None:
        async with self.server.stream() as call:
            while (batch := await queue.get()) is not None:
                await asyncio.sleep(max(0.0, batch[0] - time.monotonic()))
                await call.write(batch[1])
                await call.read()

    async def _ask(self, seconds: float, coordinator: Any) -> None:
        end = time.monotonic() + seconds
        await asyncio.sleep(min(self.delay, seconds / 2))
        while time.monotonic() < end:
            asked = self._asked.draw(ASK_KEYS)
            request = pb.LocateChunksRequest(
                chunk_keys=pb.LocateKeys(keys=[self._keys[each] for each in asked]), with_placements=True
            )
            reply = await coordinator.LocateChunks(request, timeout=30)
            for chunk, found in zip(asked, reply.chunks, strict=True):
                self.tally.note(bool(found.placements), chunk in self.owner.held)
            await asyncio.sleep(ASK_S)


async def measure(plan: Plan, target: Target, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    cells = [(delay, churn) for churn in plan.churns for delay in plan.delays]
    tell(f"staleness, {len(cells)} owners at once")
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(target.address))
        coordinator: Any = coordinator_service_pb2_grpc.CoordinatorServiceStub(channel)
        running = []
        for number, (delay, churn) in enumerate(cells):
            server = SimServer(f"owner-{number}", target.address, folder)
            running.append(_Cell(await stack.enter_async_context(server), delay, churn, number))
        await together(*(cell.run(plan.stale_s, coordinator) for cell in running))
    found = [_summary(cell, churn) for cell, (_delay, churn) in zip(running, cells, strict=True)]
    return {"capacity": CAPACITY, "cells": found}


def _summary(cell: _Cell, churn: float) -> dict[str, Any]:
    tally = cell.tally
    return {
        "event_delay_ms": round(cell.delay * 1e3),
        "eviction_rate": churn,
        "evicted_per_s": round(cell.churn, 4),
        "hints": tally.hints,
        "failed_hints": round(tally.failed / max(1, tally.hints), 5),
        "held_untold": round(tally.untold / max(1, tally.held), 5),
    }
