"""Asking the coordinators where chunks are: within milliseconds, or not at all."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvwire.telemetry import tracing
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import event_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.server.peers.hints import Hints
    from kvwire.server.peers.members import Place

log = logging.getLogger("kvwire.server")

HEDGE_SHARE: Final = 0.4
"""Of the deadline: when the next coordinator is asked, too."""
PATIENCE: Final = 3
"""Questions in a row without an answer. Then a coordinator is left alone for a while."""
REST_S: Final = 1.0


@dataclass(slots=True)
class DirectoryCounters:
    """`seconds` is the sum over all questions, those without an answer included."""

    questions: int = 0
    failures: int = 0
    asked_chunks: int = 0
    located_chunks: int = 0
    seconds: float = 0.0


class Directory:
    """`stubs` gives the coordinators that can be asked now, `knows` tells runs that can be reached."""

    def __init__(
        self, stubs: Callable[[], list[Any]], knows: Callable[[Place], bool], hints: Hints, seconds: float
    ) -> None:
        self._stubs = stubs
        self._knows = knows
        self._hints = hints
        self._seconds = seconds
        self._last: Any = None
        self._silent: dict[Any, tuple[int, float]] = {}
        """By coordinator: questions in a row without an answer, and until when it rests."""
        self.counters = DirectoryCounters()

    async def locate(self, keys: Sequence[bytes], until: float) -> list[tuple[Place, ...]]:
        """Who is thought to hold each of them in memory. From memory when nobody answers in time."""
        counters = self.counters
        counters.questions += 1
        counters.asked_chunks += len(keys)
        started = time.monotonic()
        with tracing.span("kvwire.directory", chunks=len(keys)) as span:
            reply = await self._ask(keys, min(self._seconds, until - started))
            span.set(answered=reply is not None)
        counters.seconds += time.monotonic() - started
        if reply is None:
            counters.failures += 1
            found = self._hints.of(keys)
        else:
            found = [_holders(each) for each in reply.chunks]
            for key, places in zip(keys, found, strict=True):
                self._hints.note(key, places)
        known = [tuple(place for place in places if self._knows(place)) for places in found]
        counters.located_chunks += sum(map(bool, known))
        return known

    async def _ask(self, keys: Sequence[bytes], seconds: float) -> pb.LocateChunksResponse | None:
        """The first good answer: one coordinator after the other, a slow one beside the next."""
        left = self._awake()
        if self._last in left:
            left.remove(self._last)
            left.insert(0, self._last)
        request = pb.LocateChunksRequest(chunk_keys=pb.LocateKeys(keys=keys), with_placements=True)
        end = time.monotonic() + seconds
        asked: dict[asyncio.Future[Any], Any] = {}
        try:
            while (left or asked) and (rest := end - time.monotonic()) > 0:
                if left:
                    stub = left.pop(0)
                    asked[asyncio.ensure_future(_one(stub, request, rest))] = stub
                patience = min(rest, seconds * HEDGE_SHARE) if left else rest
                done, _ = await asyncio.wait(asked, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    stub, reply = asked.pop(each), each.result()
                    if reply is not None:
                        self._last = stub
                        self._silent.pop(stub, None)
                        return reply  # type: ignore[no-any-return]
                    self._note_silent(stub)
            return None
        finally:
            for each, stub in asked.items():
                each.cancel()
                self._note_silent(stub)

    def _awake(self) -> list[Any]:
        stubs, now = self._stubs(), time.monotonic()
        self._silent = {stub: known for stub, known in self._silent.items() if stub in stubs}
        return [stub for stub in stubs if self._silent.get(stub, (0, 0.0))[1] <= now]

    def _note_silent(self, stub: Any) -> None:
        count = self._silent.get(stub, (0, 0.0))[0] + 1
        self._silent[stub] = (count, time.monotonic() + REST_S if count >= PATIENCE else 0.0)


async def _one(stub: Any, request: pb.LocateChunksRequest, seconds: float) -> pb.LocateChunksResponse | None:
    """None for whatever is no answer: the membership may also close the connection meanwhile."""
    try:
        reply = await stub.LocateChunks(request, timeout=seconds)
    except Exception as error:  # noqa: BLE001 - a fleet must not cost what is here
        log.debug("a coordinator did not say where chunks are: %r", error)
        return None
    keys = request.chunk_keys.keys
    fits = len(reply.chunks) == len(keys) and all(
        each.chunk_key == key for each, key in zip(reply.chunks, keys, strict=True)
    )
    return reply if fits else None


def _holders(chunk: pb.ChunkPlacements) -> tuple[Place, ...]:
    return tuple(
        (each.server_id, each.incarnation)
        for each in chunk.placements
        if each.tier == event_pb2.STORAGE_TIER_L1
    )
