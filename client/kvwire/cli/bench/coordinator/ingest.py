"""How fast events come in, and what heartbeats and lookups wait for meanwhile."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from kvwire.cli.bench import stats
from kvwire.cli.bench.coordinator import wire
from kvwire.cli.bench.coordinator.probe import KINDS, Probe, Samples, probing, summary
from kvwire.cli.bench.coordinator.servers import SimServer, together
from kvwire.cli.bench.coordinator.target import MEASURED, on_cores
from kvwire.cli.bench.processes import BenchError
from kvwire.v1 import coordinator_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvwire.cli.bench.coordinator.plan import Plan
    from kvwire.cli.bench.coordinator.target import Target

SENDERS = 4
BUSY = 0.9
"""Share of the time that the coordinator has to be at work, or it was the sender that was measured."""


async def measure(plan: Plan, target: Target, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(SimServer(f"ingest-{number}", target.address, folder))
            for number in range(SENDERS)
        ]
        await together(*(server.join() for server in servers))
        seeds = iter(range(1_000_000))
        for name, tokens, batches in (
            ("plain", False, plan.ingest_batches),
            ("tokens", True, plan.token_batches),
        ):
            tell(f"ingest, {name}")
            with probing(target.address, f"probe-{name}") as probe:
                await asyncio.sleep(plan.idle_s)
                idle = probe.take()
                busy: Samples = {kind: [] for kind in KINDS}
                for _ in range(plan.ingest_rounds + 1):
                    await _round(target, servers, next(seeds), batches, tokens, (probe, busy))
            # Without the probe, which wants its share of both cores.
            rounds = [
                await _round(target, servers, next(seeds), batches, tokens) for _ in range(plan.ingest_rounds)
            ]
            found[name] = _summary(rounds, batches * wire.BATCH * SENDERS)
            for kind in KINDS:
                found[name][f"{kind}_idle"] = summary(idle[kind])
                found[name][f"{kind}_busy"] = summary(busy[kind])
            found[name]["heartbeat_busy_samples_ms"] = _thinned(busy["heartbeat"])
            found[name]["heartbeat_idle_samples_ms"] = _thinned(idle["heartbeat"])
    return found


async def _round(
    target: Target,
    servers: list[SimServer],
    seed: int,
    batches: int,
    tokens: bool,
    watched: tuple[Probe, Samples] | None = None,
) -> tuple[float, float, float]:
    """Seconds: of the wall, of the coordinator's processor, of parsing the same bytes on the same core."""
    made = []
    for number, server in enumerate(servers):
        keys = wire.Keys(seed * SENDERS + number, batches * wire.BATCH)
        made.append([server.next_batch(keys.batch(each), tokens=tokens) for each in range(batches)])
        await asyncio.sleep(0)
    parse = _parse_seconds([raw for each in made for raw in each])
    if watched is not None:
        watched[0].take()
    cpu, started = target.cpu(), time.perf_counter()
    admitted = await together(*(server.send(each) for server, each in zip(servers, made, strict=True)))
    wall = time.perf_counter() - started
    if watched is not None:
        for kind, samples in watched[0].take().items():
            watched[1][kind] += samples
    if sum(admitted) != batches * SENDERS:
        raise BenchError(f"{sum(admitted)} of {batches * SENDERS} batches were admitted.")
    return wall, target.cpu() - cpu, parse


def _parse_seconds(batches: list[bytes]) -> float:
    with on_cores(MEASURED):
        best = float("inf")
        for _ in range(2):
            started = time.perf_counter()
            for raw in batches:
                pb.ReportEventsRequest.FromString(raw)
            best = min(best, time.perf_counter() - started)
    return best


def _summary(rounds: list[tuple[float, float, float]], entries: int) -> dict[str, Any]:
    wall, cpu, parse = (stats.median([each[position] for each in rounds]) for position in range(3))
    busy = cpu / wall
    return {
        "per_s": round(entries / wall),
        "per_cpu_s": round(entries / cpu) if cpu else 0,
        "parse_per_s": round(entries / parse),
        "vs_parse": round(stats.median([one[0] / one[2] for one in rounds]), 2),
        "coordinator_busy": round(busy, 2),
        "limited_by": "coordinator" if busy >= BUSY else "sender",
    }


def _thinned(samples: list[float], most: int = 2000) -> list[float]:
    step = max(1, len(samples) // most)
    return [round(value * 1e3, 3) for value in sorted(samples)[::step]]
