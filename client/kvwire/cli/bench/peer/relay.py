"""A way to a coordinator that notes when life signs pass, and can withhold what servers tell of evictions.

Run as a program with the coordinator's address and its own. Each line on its standard input is an order, one
line of JSON answers each: "take" gives the monotonic times of life signs by server since the last time,
"withhold SERVER" keeps that server's DELETE and CLEAR entries from the coordinator from now on. It ends when
its standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from kvwire.cli.bench.echo import OPTIONS
from kvwire.cli.bench.processes import BenchError, let_end
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import event_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

GONE: Final = frozenset((event_pb2.CACHE_EVENT_KIND_DELETE, event_pb2.CACHE_EVENT_KIND_CLEAR))


class Relay:
    """The running program."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process = process
        self.address = address

    def heartbeats(self) -> dict[str, list[float]]:
        """By server, since the last call; monotonic seconds."""
        found: dict[str, list[float]] = self._ask("take")
        return found

    def withhold(self, server_id: str) -> None:
        """The coordinator does not learn any more what that server evicts."""
        self._ask(f"withhold {server_id}")

    def _ask(self, order: str) -> Any:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("no pipes")
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise BenchError("The relay died; what it said is above.")
        return json.loads(line)


@contextlib.contextmanager
def relay(coordinator: str, address: str) -> Iterator[Relay]:
    argv = [sys.executable, "-m", "kvwire.cli.bench.peer.relay", coordinator, address]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        running = Relay(process, address)
        running.heartbeats()
        yield running
    finally:
        let_end(process)


class Passing(grpc.GenericRpcHandler):
    """Every method as a stream of bytes in both directions: on the wire a unary call is one, too."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self.withheld = ""
        self.heartbeats: dict[str, list[float]] = defaultdict(list)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(partial(self._pass, details.method))

    async def _pass(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        call: Any = self._channel.stream_stream(method)(timeout=context.time_remaining())
        sending = asyncio.ensure_future(self._send(method.rpartition("/")[2], requests, call))
        try:
            async for reply in call:
                yield reply
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", error.trailing_metadata() or ())
        finally:
            sending.cancel()
            call.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send(self, method: str, requests: AsyncIterator[bytes], call: Any) -> None:
        async for raw in requests:
            if method == "Heartbeat":
                server_id = pb.HeartbeatRequest.FromString(raw).server_id
                self.heartbeats[server_id].append(asyncio.get_running_loop().time())
            reports = method == "ReportEvents" and self.withheld
            await call.write(without_evictions(raw, self.withheld) if reports else raw)
        await call.done_writing()

    def order(self, name: str) -> dict[str, list[float]]:
        if name != "take":
            self.withheld = name.partition(" ")[2]
            return {}
        taken, self.heartbeats = dict(self.heartbeats), defaultdict(list)
        return taken


def without_evictions(raw: bytes, server_id: str) -> bytes:
    """A serialized ReportEventsRequest, changed if it is of that server."""
    request = pb.ReportEventsRequest.FromString(raw)
    if request.batch.server_id != server_id:
        return raw
    kept = [event for event in request.batch.events if event.kind not in GONE]
    del request.batch.events[:]
    request.batch.events.extend(kept)
    return request.SerializeToString()


async def main(coordinator: str, address: str) -> None:
    async with grpc.aio.insecure_channel(coordinator, OPTIONS) as channel:
        passing = Passing(channel)
        server = grpc.aio.server(options=OPTIONS)
        server.add_generic_rpc_handlers((passing,))
        server.add_insecure_port(address)
        await server.start()
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(passing.order(line.strip())), flush=True)
        await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
