"""Simulated cache servers: they register, give life signs, report events, and answer for snapshots."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from kvwire.cli.bench.coordinator import wire
from kvwire.cli.bench.echo import OPTIONS
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import coordinator_service_pb2_grpc, namespace_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterable
    from pathlib import Path

SERVICE: Final = "/kvwire.v1.CoordinatorService/"
CHUNK_SIZE: Final = 256
WINDOW: Final = 8
"""Batches on their way per server."""
RETRY_S: Final = 0.02
CALL_S: Final = 60.0
RECONNECT: Final = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 100),
)


class SimServer:
    """One of them. What it holds is `keys` in memory (None: nothing) and `disk` in L2."""

    def __init__(self, server_id: str, coordinator: str, folder: Path, heartbeat: float = 1.0) -> None:
        self.server_id, self.coordinator, self.heartbeat = server_id, coordinator, heartbeat
        self.incarnation = os.urandom(16)
        self.address = f"unix:{folder / server_id}.sock"
        self.sequence = 0
        self.keys: list[wire.Keys] = []
        self.disk: list[wire.Keys] = []
        self.beat_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._seen = b""

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self.coordinator, (*OPTIONS, *RECONNECT))
        self._stub: Any = coordinator_service_pb2_grpc.CoordinatorServiceStub(self._channel)
        self._report: Any = self._channel.stream_stream(
            SERVICE + "ReportEvents", response_deserializer=pb.ReportEventsResponse.FromString
        )
        self._server = grpc.aio.server(options=OPTIONS)
        pages: Any = grpc.unary_stream_rpc_method_handler(self._snapshot)
        service = "kvwire.v1.PeerService"
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {"SnapshotPlacements": pages}),)
        )
        self._server.add_insecure_port(self.address)
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.silence()
        await self._server.stop(0)
        await self._channel.close()

    async def join(self) -> pb.RegisterServerResponse:
        """Become a member, and give life signs from now on."""
        reply = await self.register()
        if not self._tasks:
            self._tasks = [asyncio.ensure_future(self._beat())]
        return reply

    async def silence(self) -> None:
        """Give no more life signs, as a killed server."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []

    async def leave(self) -> None:
        """A graceful stop."""
        await self.silence()
        await self._stub.DeregisterServer(
            pb.DeregisterServerRequest(server_id=self.server_id, incarnation=self.incarnation), timeout=CALL_S
        )

    async def register(self) -> pb.RegisterServerResponse:
        info = pb.ServerInfo(
            server_id=self.server_id,
            incarnation=self.incarnation,
            addresses=[self.address],
            chunk_size=CHUNK_SIZE,
            digest_function=namespace_pb2.DIGEST_FUNCTION_SHA256,
            version="simulated",
        )
        reply: pb.RegisterServerResponse = await self._stub.RegisterServer(
            pb.RegisterServerRequest(server=info), timeout=CALL_S
        )
        self._seen = reply.coordinator_incarnation
        return reply

    async def restart(self) -> pb.RegisterServerResponse:
        """A new run: memory is empty, L2 is not."""
        self.incarnation, self.sequence, self.keys = os.urandom(16), 0, []
        return await self.join()

    def next_batch(self, keys: bytes, **how: Any) -> bytes:
        self.sequence += 1
        return wire.store_report(self.server_id, self.incarnation, self.sequence, keys, **how)

    async def store(self, keys: wire.Keys, **how: Any) -> None:
        """Report that these are held from now on."""
        self.keys.append(keys)
        await self.send(self.next_batch(keys.batch(number), **how) for number in range(keys.batches()))

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[Any]:
        call = self._report(timeout=CALL_S * 5)
        try:
            yield call
        finally:
            await call.done_writing()
            await call.read()

    async def send(self, batches: Iterable[bytes]) -> int:
        """Send serialized requests, at most WINDOW unacknowledged; returns how many were admitted."""
        waiting = admitted = 0
        async with self.stream() as call:
            for raw in batches:
                await call.write(raw)
                waiting += 1
                if waiting == WINDOW:
                    admitted += _admitted(await call.read())
                    waiting -= 1
            for _ in range(waiting):
                admitted += _admitted(await call.read())
        return admitted

    async def _beat(self) -> None:
        while True:
            request = pb.HeartbeatRequest(
                server_id=self.server_id, incarnation=self.incarnation, last_sequence=self.sequence
            )
            try:
                self.beat_at = time.perf_counter()
                reply = await self._stub.Heartbeat(request, timeout=CALL_S, wait_for_ready=True)
                if reply.coordinator_incarnation != self._seen:
                    await self.register()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        await self.register()
                await asyncio.sleep(RETRY_S)
                continue
            await asyncio.sleep(self.heartbeat)

    async def _snapshot(self, _request: bytes, _context: Any) -> AsyncIterator[bytes]:
        sequence, incarnation = self.sequence, self.incarnation
        held = [(keys, 1) for keys in self.keys] + [(keys, 2) for keys in self.disk]
        for keys, tier in held:
            for number in range(keys.batches()):
                yield wire.page(self.server_id, incarnation, sequence, keys.batch(number), tier)
        if not held:
            yield wire.page(self.server_id, incarnation, sequence, b"")


def _admitted(reply: Any) -> int:
    return int(reply is not grpc.aio.EOF and reply.admission == pb.EVENT_ADMISSION_ADMITTED)


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    return list(await asyncio.gather(*work))


async def until(holds: Any, pause: float = 0.001) -> float:
    """Seconds until the coroutine function says yes; CALL_S are a fault."""
    started = time.monotonic()
    while not await holds():
        if time.monotonic() - started > CALL_S:
            raise TimeoutError(f"not within {CALL_S} s: {holds.__name__}")
        await asyncio.sleep(pause)
    return time.monotonic() - started
