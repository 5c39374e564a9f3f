"""What every servicer shares: the engine, the data paths, and the work that follows an engine call."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from kvwire.server.arrivals import Arrivals
from kvwire.server.dataplane.shm import ShmPath
from kvwire.server.dataplane.ucx import UcxPath
from kvwire.server.holdings import Holdings
from kvwire.server.refusals import Refusals
from kvwire.v1 import cache_service_pb2 as cache

if TYPE_CHECKING:
    from kvwire.server.arena import BackedAllocator
    from kvwire.server.binding import ChunkSizeBinding
    from kvwire.server.blending import Blending, LocalMatcher
    from kvwire.server.config import ServerConfig
    from kvwire.server.dataplane import DataPlane
    from kvwire.server.engine import CacheEngine
    from kvwire.server.eventlog import EventLog
    from kvwire.server.fetch.prefetcher import Prefetcher
    from kvwire.server.fleet import FleetLinks
    from kvwire.server.journal import Journal
    from kvwire.server.messages import EndedLease
    from kvwire.server.peers.sharing import Sharing
    from kvwire.server.pinning import Pinning
    from kvwire.server.quotas import Quotas
    from kvwire.server.sealing import Sealer
    from kvwire.server.store import ObjectRef
    from kvwire.server.tiers.levels import Tiers
    from kvwire.serving.guard import Guard
    from kvwire.serving.supervisor import Supervisor

log = logging.getLogger("kvwire.server")

ARRIVALS_S: Final = 0.02
"""How often boards are looked at while nobody asks for anything."""


class Core:
    """One server's parts. All of it lives on the event loop."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        incarnation: bytes,
        allocator: BackedAllocator,
        engine: CacheEngine,
        binding: ChunkSizeBinding,
        plane: DataPlane,
        events: EventLog,
        guard: Guard,
        supervisor: Supervisor,
        sealer: Sealer,
        server_id: str,
        pinning: Pinning,
        quotas: Quotas,
        prefetcher: Prefetcher,
        tiers: Tiers,
        journal: Journal | None = None,
        matcher: LocalMatcher | None = None,
        blending: Blending | None = None,
    ) -> None:
        self.config = config
        self.allocator = allocator
        self.arena = allocator.arena
        self.engine = engine
        self.binding = binding
        self.plane = plane
        self.events = events
        self.guard = guard
        self.supervisor = supervisor
        self.sealer = sealer
        self.server_id = server_id
        self.pinning = pinning
        self.quotas = quotas
        self.holdings = Holdings(engine.store)
        self.prefetcher = prefetcher
        self.tiers = tiers
        self.journal = journal
        self.matcher = matcher
        self.blending = blending
        self.fleet: FleetLinks
        self.sharing: Sharing | None = None
        self.incarnation = incarnation
        self.header = cache.ResponseHeader(incarnation=self.incarnation)
        self.started_at = time.time()
        self.addresses: tuple[str, ...] = ()
        self.clients = Clients()
        self.refusals = Refusals(self.now)
        self.stopping = asyncio.Event()
        self._cancelling: set[asyncio.Task[None]] = set()
        shm = plane.paths.get("shm")
        self._shm = shm if isinstance(shm, ShmPath) else None
        self.arrivals = Arrivals(engine, sealer)
        for path in plane.paths.values():
            if isinstance(path, UcxPath):
                path.publish = self._publish
        self._looking: asyncio.TimerHandle | None = None

    @staticmethod
    def now() -> float:
        return time.monotonic()

    def settle(self) -> None:
        """Follow up on what an engine call ended. Call it after every one that may end leases."""
        for ended in self.engine.drain_ended():
            task = asyncio.get_running_loop().create_task(self._cancel(ended))
            self._cancelling.add(task)
            task.add_done_callback(self._cancelling.discard)

    def absorb(self) -> None:
        """Publish what clients have said on their boards to be there.

        To be called before anything that asks what there is, or that ends leases.
        """
        if self._shm is None:
            return
        for registration_id, lease_id in self._shm.arrivals():
            self.arrivals.publish(registration_id, lease_id, self.now())

    def _publish(self, registration_id: int, lease_id: int) -> bool:
        """A client has said over UCX that all is there."""
        published = self.arrivals.publish(registration_id, lease_id, self.now())
        self.settle()
        return published

    def expect_arrivals(self) -> None:
        """Look at the boards by ourselves until nothing is waited for: events must not wait for a call."""
        if self._looking is None and self._shm is not None and self._shm.awaits_arrivals:
            self._looking = asyncio.get_running_loop().call_later(ARRIVALS_S, self._look)

    def close_store(self, registration_id: int, lease_id: int) -> None:
        """The client has ended a write lease by a call."""
        if self._shm is not None:
            self._shm.close_store(registration_id, lease_id)

    def discard(self, ref: ObjectRef) -> None:
        """Drop an object that was found damaged."""
        self.engine.discard(ref)
        if self._shm is not None:
            self._shm.doubt_all()

    def sweep(self) -> None:
        """End what has run out, free what dead owners held, keep memory below the watermark."""
        self.absorb()
        now = self.now()
        for registration_id in self.clients.attached():
            # gRPC's own keepalive ends the stream of a client that hangs: an open one is a sign of life.
            self.engine.ping(registration_id, now)
        expired = self.engine.expire(now)
        for registration_id in expired.registration_ids:
            self.left(registration_id)
        self.settle()
        self._free_dead_owners()
        if not self.tiers.keep_below_watermark():
            self.engine.evict_to(self.config.watermark)

    def left(self, registration_id: int) -> None:
        """A registration has ended, whatever the reason."""
        self.clients.leave(registration_id)
        for path in self.plane.paths.values():
            path.leave(registration_id)

    def _look(self) -> None:
        self._looking = None
        self.absorb()
        self.expect_arrivals()

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        await self.prefetcher.close()
        self.engine.shutdown()
        self.settle()
        if self._cancelling:
            await asyncio.wait(self._cancelling, timeout=2.0)
        if self.sharing is not None:
            await self.sharing.close()
        await self.pinning.close()
        await self.plane.close()

    def _free_dead_owners(self) -> None:
        shm = self._shm
        if shm is None:
            return
        owners = {owner.registration_id for owner in self.engine.quarantined_owners()}
        for registration_id in owners:
            if shm.is_dead(registration_id):
                self.engine.owner_dead(registration_id)
                self.left(registration_id)
        shm.reap(owners | {each.registration_id for each in self.engine.status().registrations})

    async def _cancel(self, ended: EndedLease) -> None:
        try:
            await self.plane.path(ended.data_path).cancel(ended.lease_id)
        except Exception:
            # Its memory stays taken: better lost than written to by a transfer that may still run.
            log.exception("lease %d on %s could not be cancelled", ended.lease_id, ended.data_path)
            return
        self.engine.confirm_cancelled(ended.lease_id)


class Clients:
    """What the server keeps of a client beside the engine: its path, and whether it is attached."""

    def __init__(self) -> None:
        self._clients: dict[int, Client] = {}

    def join(self, registration_id: int, client: Client) -> None:
        self._clients[registration_id] = client

    def get(self, registration_id: int) -> Client | None:
        return self._clients.get(registration_id)

    def attached(self) -> list[int]:
        return [registration_id for registration_id, client in self._clients.items() if client.attached]

    def leave_all(self) -> None:
        for registration_id in list(self._clients):
            self.leave(registration_id)

    def leave(self, registration_id: int) -> None:
        client = self._clients.pop(registration_id, None)
        if client is not None:
            client.gone.set()


class Client:
    """`gone` is set when the registration ends. `groups` is the number of KV groups of its layout."""

    def __init__(self, path: str, path_reason: str, groups: int) -> None:
        self.path = path
        self.path_reason = path_reason
        self.groups = groups
        self.streams = 0
        self.gone = asyncio.Event()

    @property
    def attached(self) -> bool:
        return self.streams > 0
