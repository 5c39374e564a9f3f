"""From a chunk that is stored at a real cache server until the coordinator tells of it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

import grpc

from kvwire.cli.bench import stats
from kvwire.cli.bench.coordinator import wire
from kvwire.cli.bench.coordinator.servers import CHUNK_SIZE, SimServer, until
from kvwire.cli.bench.coordinator.target import coordinator, stub
from kvwire.cli.bench.echo import open_channel
from kvwire.cli.bench.processes import BenchError, kvwire_server
from kvwire.cli.bench.prompts import Prompts
from kvwire.client import Client
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import namespace_pb2

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvwire.cli.bench.coordinator.plan import Plan

CHUNKS: Final = 4
PATIENCE_S: Final = 10.0


def measure(plan: Plan, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """`visible_ms` is of a real server; null and `visible_skipped` where it cannot be had."""
    tell("how soon a stored chunk is located")
    with coordinator(folder, name="seen") as target, open_channel(target.address) as channel:
        locate = stub(channel).LocateChunks
        reported = asyncio.run(_reported(plan, target.address, folder, locate))
        found: dict[str, Any] = {"visible_reported_ms": _milliseconds(stats.median(reported))}
        try:
            seconds = _stored(plan, target.address, folder, locate)
        except BenchError as error:
            return {"visible_ms": None, "visible_skipped": str(error), **found}
    return {
        "visible_ms": _milliseconds(stats.median(seconds)),
        "visible_max_ms": _milliseconds(max(seconds)),
        **found,
    }


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 2)


async def _reported(plan: Plan, address: str, folder: Path, locate: Any) -> list[float]:
    """Seconds from the report of a simulated server, which waits for nothing."""
    found = []
    async with SimServer("reporting", address, folder) as server:
        await server.join()
        for number in range(plan.visible_rounds):
            keys = wire.Keys(90_000 + number, 1)
            ask = pb.LocateChunksRequest(chunk_keys=pb.LocateKeys(keys=[keys.batch(0)]))

            async def told(ask: pb.LocateChunksRequest = ask) -> bool:
                return bool(locate(ask).servers)

            started = time.perf_counter()
            await server.store(keys)
            await until(told)
            found.append(time.perf_counter() - started)
        await server.leave()
    return found


def _stored(plan: Plan, address: str, folder: Path, locate: Any) -> list[float]:
    flags = ("--coordinator", address, "--l1-size", "64MiB", "--data-paths", "inline")
    with kvwire_server(folder, flags) as server, Client(server, client_name="kvwire bench") as client:
        prompts = Prompts(client)
        _stored_until_located(prompts, locate)
        return [_stored_until_located(prompts, locate) for _ in range(plan.visible_rounds)]


def _stored_until_located(prompts: Prompts, locate: Callable[[pb.LocateChunksRequest], Any]) -> float:
    """Seconds from the answer to CommitStore."""
    prompt = prompts.stored(CHUNKS * CHUNK_SIZE)
    started = prompts.stored_at
    ask = pb.LocateChunksRequest(
        namespace=namespace_pb2.Namespace(model=prompts.namespace.model), tokens=prompt.tokens
    )
    while time.perf_counter() - started < PATIENCE_S:
        try:
            if locate(ask).combined_prefix_chunks == CHUNKS:
                return time.perf_counter() - started
        except grpc.RpcError as error:
            # Until the server has told its chunk size, tokens cannot be cut.
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise
        time.sleep(0.0005)
    raise BenchError(f"A stored chunk was not locatable within {PATIENCE_S} s.")
