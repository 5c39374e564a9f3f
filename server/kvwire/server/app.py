"""The cache server put together, in reading order."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from typing import TYPE_CHECKING, Any, Final

from kvwire.server.admin import AdminService
from kvwire.server.arena import BackedAllocator, grow_ahead, make_arena
from kvwire.server.binding import Binder, ChunkSizeBinding
from kvwire.server.blending import Blending, LocalMatcher
from kvwire.server.core import Core
from kvwire.server.dataplane.paths import make_plane
from kvwire.server.engine import CacheEngine
from kvwire.server.eventlog import EventLog, StoreEvents
from kvwire.server.fetch.prefetcher import FetchLimits, Prefetcher
from kvwire.server.fleet import FleetLinks, JournalWriter, coordinator_channels, make_journal
from kvwire.server.leases import MAX_LEASE_ID
from kvwire.server.limits import OPEN_WHILE_DRAINING, UNLIMITED
from kvwire.server.metrics import OPEN_STREAMS, ServerState, server_registry
from kvwire.server.peer import PeerService
from kvwire.server.peers.calls import Calls
from kvwire.server.peers.metrics import SharingFacts
from kvwire.server.peers.sharing import Sharing
from kvwire.server.pinning import Pinning
from kvwire.server.quotas import Quotas
from kvwire.server.reporting.kafka import KafkaReporter
from kvwire.server.sealing import Sealer
from kvwire.server.service import CacheService
from kvwire.server.state import EngineConfig
from kvwire.server.store import L1Store, Listeners, make_policy
from kvwire.server.tiers.levels import make_tiers
from kvwire.serving.endpoint import Endpoint, problem
from kvwire.serving.guard import Guard
from kvwire.serving.http import HttpServer, server_routes
from kvwire.serving.metrics import RpcMetrics
from kvwire.serving.supervisor import Supervisor, every
from kvwire.serving.version import server_version
from kvwire.transfer.hosts import host_id
from kvwire.v1 import admin_service_pb2_grpc, cache_service_pb2_grpc, peer_service_pb2_grpc

if TYPE_CHECKING:
    import grpc

    from kvwire.server.config import ServerConfig
    from kvwire.server.store import StoreListener

log = logging.getLogger("kvwire.server")

SERVICES: Final = ("kvwire.v1.CacheService", "kvwire.v1.AdminService", "kvwire.v1.PeerService")


class CacheServer:
    """One server: `start`, `run until told`, `stop`. Everything it opened is closed after `stop`."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        # What may be refused comes before memory is taken.
        self._endpoint = Endpoint(config, SERVICES)
        coordinators = coordinator_channels(config)
        calls = Calls(config) if coordinators and config.peers else None
        kafka = KafkaReporter(config) if config.report_events == "kafka" else None
        self.core = _make_core(config, self._endpoint.on_task_death)
        self._rpcs = RpcMetrics(OPEN_STREAMS)
        self.core.guard.observe = self._rpcs
        self._http = HttpServer(server_routes(self._registry(), self._problem))
        self.http_address = ""
        if calls is not None:
            self.core.sharing = Sharing(self.core, calls)
            self.core.prefetcher.add(self.core.sharing.source)
        self.core.fleet = FleetLinks(self.core, coordinators, kafka)
        self._endpoint.make(self._add_services)

    async def start(self) -> None:
        """Listen and serve. Raises ConfigError for an address or a lower tier that cannot be had, and leaves
        nothing open."""
        try:
            await self.core.tiers.start(self.core.supervisor)
            await self._endpoint.start()
            self.core.addresses = self._endpoint.addresses
            if self.config.http:
                self.http_address = await self._http.start(self.config.http)
        except BaseException:
            await self.stop(0)
            raise
        self.core.supervisor.start("sweep", every(self.config.sweep_interval, self.core.sweep))
        self.core.supervisor.start("seal", self.core.sealer.run())
        self.core.supervisor.start("grow", grow_ahead(self.core.allocator))
        self.core.quotas.started()
        self.core.fleet.start()
        await self._endpoint.set_health(serving=True)

    async def stop(self, grace: float | None = None) -> None:
        """Refuse new work, let calls in flight end within `grace` seconds, then end everything."""
        core = self.core
        grace = self.config.drain if grace is None else grace
        until = core.now() + grace
        core.guard.drain()
        core.stopping.set()
        core.prefetcher.answer_now()
        core.events.close()
        await self._endpoint.set_health(serving=False)
        # The fleet is told at once that nothing new is taken here, and may hang meanwhile.
        await asyncio.gather(core.guard.drained(grace), core.fleet.leave())
        core.clients.leave_all()
        await self._endpoint.stop()
        await core.tiers.flush(until)
        await core.supervisor.stop()
        await core.stop()
        await core.tiers.close()
        await self._http.close()
        core.sealer.close()
        core.arena.unlink()
        core.arena.close()
        self._endpoint.remove_sockets()

    def _add_services(self, server: grpc.aio.Server) -> None:
        core = self.core
        core.guard.add(server, cache_service_pb2_grpc.add_CacheServiceServicer_to_server, CacheService(core))
        core.guard.add(server, admin_service_pb2_grpc.add_AdminServiceServicer_to_server, AdminService(core))
        core.guard.add(server, peer_service_pb2_grpc.add_PeerServiceServicer_to_server, PeerService(core))

    def _problem(self) -> str:
        return problem(self.core.supervisor, self.core.guard)

    def _registry(self) -> Any:
        core = self.core

        def read() -> ServerState:
            core.absorb()
            return ServerState(
                engine=core.engine.status(),
                calls_in_flight=core.guard.in_flight,
                rejected=core.guard.rejected,
                task_deaths=core.supervisor.deaths,
                draining=core.guard.draining,
                fetched=core.prefetcher.counters,
                fetches=core.prefetcher.under_way,
                fetching_bytes=core.prefetcher.budget.used,
                tiers=tuple(core.tiers.status()),
                sharing=core.sharing.facts() if core.sharing is not None else SharingFacts(),
                **core.fleet.facts(),
            )

        return server_registry(self._rpcs, read, version=server_version(), server_id=core.server_id)


def _make_core(config: ServerConfig, on_task_death: Any) -> Core:
    incarnation = secrets.token_bytes(16)
    policy = make_policy(config.policy, config.l1_size)
    server_id = config.server_id or socket.gethostname()
    journal = make_journal(config, server_id, incarnation)
    tiers = make_tiers(config, server_id, journal)
    arena = make_arena(config, incarnation)
    events = EventLog()
    allocator = BackedAllocator(arena)
    matcher = LocalMatcher(config.blend_memory) if config.enable_blend_lookup else None
    listeners: list[StoreListener] = [StoreEvents(events)]
    if journal is not None:
        listeners.append(JournalWriter(journal, with_tokens=config.report_tokens))
    if matcher is not None:
        listeners.append(matcher)
    if tiers:
        listeners.append(tiers)
    store = L1Store(allocator, policy, Listeners(*listeners))
    try:
        pinning = Pinning(store, config.state)
    except BaseException:
        arena.unlink()
        arena.close()
        raise

    def session_started() -> None:
        binding.session_started()

    def tell_fleet() -> None:
        asyncio.get_running_loop().call_soon(core.fleet.changed)

    engine = CacheEngine(store, _engine_config(config), session_started)
    binders = (
        Binder("token hasher", engine.bind_chunk_size),
        Binder("session manager", engine.bind_chunk_size),
        Binder("blend matcher", matcher.bind_chunk_size if matcher is not None else lambda _size: None),
        Binder("telemetry", lambda size: log.info("chunk size bound: %d tokens", size)),
        # It waits for no coordinator: each is told as soon as it can be.
        Binder("coordinator membership", lambda _size: tell_fleet()),
    )
    binding = ChunkSizeBinding(config.chunk_size, config.max_chunk_size, binders)
    sealer = Sealer(arena.view, engine.set_checksum)
    tiers.attach(store, arena.view, sealer, config.watermark)
    core = Core(
        config=config,
        allocator=allocator,
        engine=engine,
        binding=binding,
        plane=make_plane(config, arena, host_id()),
        incarnation=incarnation,
        events=events,
        guard=Guard(config.max_in_flight, UNLIMITED, OPEN_WHILE_DRAINING),
        supervisor=Supervisor(on_task_death),
        sealer=sealer,
        server_id=server_id,
        pinning=pinning,
        quotas=Quotas(store, pinning.own),
        prefetcher=Prefetcher(
            engine.fills, arena.view, FetchLimits.of(allocator.capacity, config.write_lease)
        ),
        tiers=tiers,
        journal=journal,
        matcher=matcher,
        blending=Blending(matcher, store, server_id, incarnation) if matcher is not None else None,
    )
    for tier in tiers.tiers:
        core.holdings.attach(tier.name, tier)
        core.quotas.attach(tier.name, tier.index)
    core.prefetcher.make_way = tiers.make_way
    for source in tiers.sources:
        core.prefetcher.add(source)
    return core


def _engine_config(config: ServerConfig) -> EngineConfig:
    return EngineConfig(
        lookup_ttl=config.lookup_lease,
        read_ttl=config.read_lease,
        write_ttl=config.write_lease,
        session_ttl=config.session_ttl,
        registration_ttl=config.registration_ttl,
        max_sessions=config.max_sessions,
        max_registrations=config.max_registrations,
        first_lease=1 + secrets.randbelow(MAX_LEASE_ID),
    )
