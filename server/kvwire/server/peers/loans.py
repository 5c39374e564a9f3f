"""One lease of another server: its bytes, and the proof that it was held while they came."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from kvwire.errors import KvwireError, LeaseLost, ObjectNotFound, TransferFailed, TransferTimeout
from kvwire.server.peers.receiving import Part, Receiving
from kvwire.telemetry import tracing
from kvwire.transfer import tags
from kvwire.transfer.tags import Kind
from kvwire.v1 import peer_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from kvwire.server.fetch.source import Target
    from kvwire.server.layout import ShardMap
    from kvwire.server.peers.borrowing import Ticket
    from kvwire.server.peers.calls import Calls
    from kvwire.server.peers.links import Link, Links
    from kvwire.server.peers.members import PeerInfo

    Done = Callable[[Target, bytes, KvwireError | None], None]

log = logging.getLogger("kvwire.server")

MARGIN_S: Final = 0.1
"""Kept for the release, of the time that a fetch has."""
LOOK_S: Final = 0.02
STALL_S: Final = 5.0
"""Between two messages of a transfer. When none comes for so long, none is waited for any more."""
PATIENCE_S: Final = 0.3
"""How long what was given up may still go on, until its connection is closed."""


@dataclass(slots=True)
class LoanTools:
    """What all loans of a server share. `background` runs what nobody waits for."""

    own_id: str
    calls: Calls
    links: Links
    pool: ThreadPoolExecutor
    background: Callable[[Coroutine[object, object, object]], None]
    stopping: Callable[[], bool]


@dataclass(slots=True)
class Outcome:
    """What one fetch has brought: chunks whose targets are all good, their bytes, and why the rest failed."""

    chunks: set[int] = field(default_factory=set)
    size: int = 0
    error: KvwireError | None = None


class Loan:
    """A checked ticket. It is fetched once, or released."""

    def __init__(
        self, tools: LoanTools, peer: PeerInfo, shards: ShardMap, ticket: Ticket, transfer: int
    ) -> None:
        self.peer = peer
        self.ticket = ticket
        self.used = False
        self._tools = tools
        self._shards = shards
        self._transfer = transfer
        self._abort = asyncio.Event()

    def masks(self, chunks: int) -> list[int]:
        found = [0] * chunks
        for index, shard in self.ticket.objects or ():
            found[index] |= 1 << shard
        return found

    async def fetch(self, targets: Sequence[Target], done: Done, until: float) -> Outcome:
        """As `Found.fetch`. Cancelled, it ends as soon as nothing touches the targets any more."""
        self.used = True
        work = asyncio.get_running_loop().create_task(self._fetch(targets, done, until), name="kvwire-loan")
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            self._abort.set()
            await asyncio.wait({work})
            raise

    def release(self) -> None:
        """Let go of what was not fetched, without waiting for it."""
        if not self.used:
            self.used = True
            self._discard()
            if self.ticket.lease_id:
                self._tools.background(self._release())

    async def _fetch(self, targets: Sequence[Target], done: Done, until: float) -> Outcome:
        outcome = Outcome()
        size = sum(target.size for target in targets)
        with tracing.span(
            "kvwire.peer.fetch", peer=self.peer.server_id, path=self.ticket.path, size_bytes=size
        ) as span:
            parts = self._parts(targets)
            try:
                await self._move(parts, until, partial(_tell, parts, done, outcome))
            except KvwireError as error:
                outcome.error = error
            for target in parts:
                done(target, b"", outcome.error or _incomplete(self.peer.server_id))
            parts.clear()
            for target in targets:
                if (target.index, target.shard) not in (self.ticket.objects or {}):
                    outcome.error = ObjectNotFound("It was not in the ticket.")
                    done(target, b"", outcome.error)
            span.set(fetched_bytes=outcome.size, error=str(outcome.error or ""))
        return outcome

    async def _move(self, parts: dict[Target, Part], until: float, good: Callable[[], None]) -> None:
        """Receive, prove, tell of the good ones; returns or raises when nothing touches any part any more."""
        if not parts:
            self._discard()
            self._tools.background(self._release())
            return
        try:
            link = await self._tools.links.connect(self.ticket.path, self.ticket.address, self.peer.server_id)
            plane = await link.path.started()
            receiving = Receiving(
                plane.engine,
                link.peer,
                list(parts.values()),
                self.ticket.piece_bytes,
                pool=self._tools.pool,
                path=self.ticket.path,
            )
        except KvwireError:
            self._discard()
            self._tools.background(self._release())
            raise
        link.users += 1
        try:
            if len(parts) < len(self.ticket.objects or ()):
                # What nobody wants must not be in the way of the rest.
                plane.engine.discard(receiving.first_tag)
            await self._prove(receiving, link, until, good)
        finally:
            await self._end(receiving, link)
            link.users -= 1

    async def _prove(self, receiving: Receiving, link: Link, until: float, good: Callable[[], None]) -> None:
        """Raises KvwireError unless the lease was held until all that has come was there."""
        await self._wait(receiving, link, until - MARGIN_S)
        if self._abort.is_set():
            self._tools.background(self._release())
            raise TransferTimeout("Nobody waits for it any more.", path=self.ticket.path)
        if not receiving.has_any:
            self._tools.background(self._release())
        elif await self._release(max(until - time.monotonic(), MARGIN_S)):
            good()
        else:
            raise LeaseLost(f"{self.peer.server_id} did not hold the lease.", lease_id=self.ticket.lease_id)
        if receiving.error is not None:
            raise receiving.error
        if not receiving.is_complete:
            raise TransferTimeout(
                f"The bytes did not come from {self.peer.server_id} in time.", path=self.ticket.path
            )

    async def _wait(self, receiving: Receiving, link: Link, until: float) -> None:
        """Until all has come, or nothing comes any more. A new connection has to show that it moves bytes."""
        aborted = asyncio.ensure_future(self._abort.wait())
        came = asyncio.ensure_future(receiving.news.wait())
        try:
            while (rest := until - time.monotonic()) > 0:
                before = receiving.moved
                patience = STALL_S if link.proven or before else self._tools.links.seconds
                over, _ = await asyncio.wait(
                    {aborted, came}, timeout=min(rest, patience), return_when=asyncio.FIRST_COMPLETED
                )
                link.proven = link.proven or receiving.moved > 0
                if over or receiving.moved == before:
                    return
        finally:
            aborted.cancel()
            came.cancel()

    async def _end(self, receiving: Receiving, link: Link) -> None:
        """Wait until nothing touches the targets. A peer that hangs is parted from for that."""
        if not receiving.is_complete:
            receiving.stop()
        started = time.monotonic()
        while not receiving.is_over and not self._tools.stopping():
            await asyncio.sleep(LOOK_S)
            if time.monotonic() - started > PATIENCE_S:
                link.close()

    async def _release(self, seconds: float = 10.0) -> bool:
        """Whether the lease was held until now. False when that cannot be told."""
        request = pb.ReleaseLeaseRequest(requester_id=self._tools.own_id, lease_ids=[self.ticket.lease_id])
        try:
            reply = await self._tools.calls.call(self.peer, "ReleaseLease", request, seconds)
        except KvwireError as error:
            log.debug("%s: %s", self.peer.server_id, error)
            return False
        return list(reply.held) == [True]

    def _parts(self, targets: Sequence[Target]) -> dict[Target, Part]:
        parts = {}
        for target in targets:
            lent = (self.ticket.objects or {}).get((target.index, target.shard))
            if lent is not None and lent.size == target.size:
                name = (target.index, target.shard % self._shards.num_groups)
                parts[target] = Part(name, target.view, lent.first_tag, lent.checksum)
        return parts

    def _discard(self) -> None:
        """Drop the messages of this loan, so that the peer gets its memory back."""
        self._tools.links.discard(tags.encode(Kind.PEER, self._transfer))


def _tell(parts: dict[Target, Part], done: Done, outcome: Outcome) -> None:
    """Of the good ones, which leave `parts`."""
    for target, part in list(parts.items()):
        if part.is_good:
            del parts[target]
            outcome.size += target.size
            outcome.chunks.add(target.index)
            done(target, part.checksum, None)


def _incomplete(server_id: str) -> TransferFailed:
    return TransferFailed(f"Not all of it came from {server_id}.", path="ucx", cause="incomplete")
