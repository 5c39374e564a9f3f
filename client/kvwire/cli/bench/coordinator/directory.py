"""Questions, memory and fencing, by the number of keys in the directory."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvwire.cli.bench import stats
from kvwire.cli.bench.control import timed
from kvwire.cli.bench.coordinator import wire
from kvwire.cli.bench.coordinator.probe import probing, summary
from kvwire.cli.bench.coordinator.servers import CHUNK_SIZE, SimServer, until
from kvwire.cli.bench.coordinator.target import MEASURED, on_cores, stub
from kvwire.cli.bench.echo import PAYLOAD, echo_call, echo_server, open_channel
from kvwire.cli.bench.processes import BenchError
from kvwire.keys import Namespace, chunk_keys, root
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import namespace_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvwire.cli.bench.coordinator.plan import Plan
    from kvwire.cli.bench.coordinator.target import Target

PROMPTS: Final = 8
PROMPT_TOKENS: Final = 131_072
MODEL: Final = "bench"
WARM_BATCHES: Final = 50


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of lookup: requests that take turns, and the prefix that each must find."""

    requests: list[pb.LocateChunksRequest]
    expected: int


async def measure(plan: Plan, target: Target, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    prompts = [os.urandom(4 * PROMPT_TOKENS) for _ in range(PROMPTS)]
    chunk_root = root(Namespace(model=MODEL), CHUNK_SIZE)
    keys = [chunk_keys(chunk_root, prompt, CHUNK_SIZE) for prompt in prompts]
    kinds = _kinds(prompts, keys)
    sizes: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        big, rest = [
            await stack.enter_async_context(SimServer(name, target.address, folder))
            for name in ("big", "rest")
        ]
        await big.join()
        await rest.join()
        await _warm_up(target, rest, kinds["tokens_131072_miss"].requests)
        await asyncio.sleep(plan.settle_s)
        empty, known = target.memory(), 0
        for size in plan.sizes:
            tell(f"a directory of {size:,} keys")
            given = b"".join(key for each in keys for key in each) if not known else b""
            owner = big if size <= plan.fenced else rest
            await owner.store(wire.Keys(10_000 + size, size - known, given))
            known = size
            await asyncio.sleep(plan.settle_s)
            with _yardsticks(target, folder) as (echo, locate):
                lookups = _lookups(plan, kinds, echo, locate)
            memory = target.memory() - empty
            sizes.append({"keys": size, "bytes_per_key": round(memory / size, 1), "lookups": lookups})
        tell(f"fencing {plan.fenced:,} placements")
        fence = await _fence(plan, target, big)
    return {"sizes": sizes, "fence": fence}


async def _warm_up(target: Target, server: SimServer, requests: list[pb.LocateChunksRequest]) -> None:
    """What a process keeps for its messages is not memory of keys."""
    keys = wire.Keys(1, wire.BATCH).batch(0)
    await server.send(server.next_batch(keys) for _ in range(WARM_BATCHES))
    server.keys = [wire.Keys(1, wire.BATCH)]
    with open_channel(target.address) as channel:
        timed(stub(channel).LocateChunks, requests * 5)


@contextmanager
def _yardsticks(target: Target, folder: Path) -> Iterator[tuple[Any, Any]]:
    with on_cores(MEASURED):
        started = echo_server(folder)
        address = started.__enter__()
    try:
        with open_channel(address) as echo, open_channel(target.address) as channel:
            yield echo_call(echo), stub(channel).LocateChunks
    finally:
        started.__exit__(None, None, None)


def _kinds(prompts: list[bytes], keys: list[list[bytes]]) -> dict[str, Kind]:
    named = namespace_pb2.Namespace(model=MODEL)
    absent = [os.urandom(4 * PROMPT_TOKENS) for _ in range(2)]

    def by_tokens(each: bytes) -> pb.LocateChunksRequest:
        return pb.LocateChunksRequest(namespace=named, tokens=each)

    def by_keys(each: list[bytes]) -> pb.LocateChunksRequest:
        return pb.LocateChunksRequest(chunk_keys=pb.LocateKeys(keys=each))

    chunks = PROMPT_TOKENS // CHUNK_SIZE
    return {
        "tokens_131072": Kind([by_tokens(each) for each in prompts], chunks),
        "tokens_131072_miss": Kind([by_tokens(each) for each in absent], 0),
        "keys_512": Kind([by_keys(each) for each in keys], chunks),
        "keys_1": Kind([by_keys(each[:1]) for each in keys], 1),
    }


def _lookups(plan: Plan, kinds: dict[str, Kind], echo: Any, locate: Any) -> dict[str, dict[str, float]]:
    """Echo and lookups take turns; the first round warms up."""
    series: dict[str, list[tuple[list[float], float]]] = {name: [] for name in kinds}
    same: list[float] = []
    payloads = [PAYLOAD] * plan.lookups
    raw = kinds["tokens_131072"].requests[0].SerializeToString()
    for number in range(plan.lookup_rounds + 1):
        before = timed(echo, payloads)
        for name, kind in kinds.items():
            requests = [kind.requests[each % len(kind.requests)] for each in range(plan.lookups)]
            replies: list[pb.LocateChunksResponse] = []
            samples = timed(locate, requests, replies)
            wrong = [each for each in replies if each.combined_prefix_chunks != kind.expected]
            if wrong:
                raise BenchError(
                    f"{name}: {wrong[0].combined_prefix_chunks} chunks found instead of {kind.expected}."
                )
            after = timed(echo, payloads)
            if number:
                series[name].append((samples, stats.median([*before, *after])))
            before = after
        same.append(stats.median(timed(echo, [raw] * max(2, plan.lookups // 4))))
    found = {name: _summary(rounds) for name, rounds in series.items()}
    found["tokens_131072"]["vs_same_bytes_echo"] = round(
        stats.median([stats.median(samples) for samples, _echo in series["tokens_131072"]])
        / stats.median(same[1:]),
        2,
    )
    return found


def _summary(rounds: list[tuple[list[float], float]]) -> dict[str, float]:
    p50 = [stats.median(samples) for samples, _echo in rounds]
    every = [sample for samples, _echo in rounds for sample in samples]
    return {
        "p50_ms": round(stats.median(p50) * 1e3, 3),
        "p99_ms": round(stats.percentile(every, 0.99) * 1e3, 3),
        "vs_echo": round(stats.median_ratio(p50, [echo for _samples, echo in rounds]), 2),
    }


async def _fence(plan: Plan, target: Target, big: SimServer) -> dict[str, Any]:
    """The server restarts: a new run registers. Somebody else's life signs and lookups go on."""
    with open_channel(target.address) as channel, probing(target.address) as probe:
        coordinator = stub(channel)
        key = big.keys[0].batch(0)[: wire.KEY_BYTES]
        ask = pb.LocateChunksRequest(chunk_keys=pb.LocateKeys(keys=[key]))
        await asyncio.sleep(plan.fence_watch_s)
        before, cpu = probe.take(), target.cpu()

        async def gone() -> bool:
            return not coordinator.LocateChunks(ask).servers

        started = time.perf_counter()
        await big.restart()
        registered = time.perf_counter() - started
        await until(gone)
        fenced = time.perf_counter() - started
        await asyncio.sleep(plan.fence_watch_s)
        during = probe.take()
    return {
        "placements": plan.fenced,
        "register_ms": round(registered * 1e3, 2),
        "fenced_ms": round(fenced * 1e3, 2),
        "freed_cpu_s": round(target.cpu() - cpu, 2),
        **{f"{kind}_before": summary(samples) for kind, samples in before.items()},
        **{f"{kind}_during": summary(samples) for kind, samples in during.items()},
    }
