"""Events over `CoordinatorService.ReportEvents`: in order, acknowledged, sent again after a break."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from kvwire.server.reporting.batches import with_lost
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import event_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.server.journal import Reader

WINDOW: Final = 64
"""Batches that may be on the way without an answer."""
SILENCE_S: Final = 10.0
"""For an answer to what was sent; then the stream is given up, and opened anew."""


class RpcReporter:
    """One stream at a time. `run` ends with what ended the stream, raised. Each answer calls `arrived`."""

    def __init__(self, reader: Reader, arrived: Callable[[], None]) -> None:
        self._reader = reader
        self._arrived = arrived
        self._room = asyncio.Semaphore(WINDOW)

    async def run(self, stub: Any) -> None:
        """Raises grpc.RpcError, and TimeoutError when nothing is acknowledged for `SILENCE_S`."""
        self._reader.rewind()
        self._room = asyncio.Semaphore(WINDOW)
        # Written to, rather than given an iterator: gRPC goes on with an iterator after the server has ended
        # the stream, and what it takes then is lost.
        call = stub.ReportEvents()
        sending = asyncio.ensure_future(self._send(call))
        try:
            while True:
                reply = await self._answer(call)
                if reply is None:
                    return
                # 0: a batch of an earlier run, which cannot be.
                self._reader.acknowledge(reply.sequence)
                self._room.release()
                self._arrived()
        finally:
            sending.cancel()
            call.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _answer(self, call: Any) -> pb.ReportEventsResponse | None:
        reading = asyncio.ensure_future(call.read())
        try:
            while True:
                waiting = self._reader.position > self._reader.acknowledged
                done, _ = await asyncio.wait({reading}, timeout=SILENCE_S)
                if done:
                    reply: Any = reading.result()
                    return reply if isinstance(reply, pb.ReportEventsResponse) else None
                if waiting:
                    raise TimeoutError(f"no batch was acknowledged for {SILENCE_S:.0f} s")
        finally:
            reading.cancel()

    async def _send(self, call: Any) -> None:
        """Until the stream ends, which `run` sees for itself."""
        while True:
            await self._room.acquire()
            for closed in await self._reader.wait(1):
                batch = event_pb2.CacheEventBatch.FromString(with_lost(closed))
                await call.write(pb.ReportEventsRequest(batch=batch))
