"""CoordinatorService: every method checks its request, asks the fleet once, and builds the reply."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import grpc

from kvwire.coordinator import convert
from kvwire.coordinator.questions import Questions
from kvwire.errors import Draining, Overloaded
from kvwire.serving.version import server_version
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import coordinator_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvwire.coordinator.core import Core

OPEN_STREAMS: Final = frozenset({"ReportEvents", "WatchServers", "WatchEvents"})
"""Held open for a client's life: counted when they end, without a duration."""
UNLIMITED: Final = OPEN_STREAMS | {
    "RegisterServer",
    "Heartbeat",
    "DeregisterServer",
    "ListServers",
    "GetIntents",
    "GetDirectoryStats",
}
"""Calls that are never refused for load: those that the fleet lives by, and cheap ones."""
MAX_MEMBERS: Final = 10_000


class CoordinatorService(coordinator_service_pb2_grpc.CoordinatorServiceServicer):
    def __init__(self, core: Core) -> None:
        self._core = core
        self._fleet = core.fleet
        self._questions = Questions(core)

    async def RegisterServer(
        self, request: pb.RegisterServerRequest, context: Any
    ) -> pb.RegisterServerResponse:
        core = self._core
        _refuse_new(core)
        info = convert.server_info(request.server)
        _check_room(core, info.server_id)
        done = self._fleet.register(info, core.now())
        core.tell_changes()
        core.pulls_due.set()
        return pb.RegisterServerResponse(
            coordinator_incarnation=core.incarnation,
            heartbeat_interval=convert.duration(core.config.heartbeat),
            expires_after=convert.duration(core.config.expire_after),
            next_sequence=done.next_sequence,
            sharing=not done.sharing_problem,
            sharing_problem=done.sharing_problem,
            intent_revision=core.intent_revision,
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        core = self._core
        self._fleet.heartbeat(
            request.server_id,
            request.incarnation,
            core.now(),
            request.used_bytes,
            request.last_sequence,
            convert.usage(request),
        )
        return pb.HeartbeatResponse(
            coordinator_incarnation=core.incarnation, intent_revision=core.intent_revision
        )

    async def DeregisterServer(
        self, request: pb.DeregisterServerRequest, context: Any
    ) -> pb.DeregisterServerResponse:
        self._fleet.deregister(request.server_id, request.incarnation)
        self._core.tell_changes()
        return pb.DeregisterServerResponse()

    async def ListServers(self, request: pb.ListServersRequest, context: Any) -> pb.ListServersResponse:
        return pb.ListServersResponse(members=self._core.members())

    def WatchServers(
        self, request: pb.WatchServersRequest, context: Any
    ) -> AsyncIterator[pb.WatchServersResponse]:
        return self._core.servers.follow(self._core.members)

    async def ReportEvents(  # type: ignore[override]
        self, request_iterator: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[pb.ReportEventsResponse]:
        """Takes serialized requests: see `add_to_server`."""
        core = self._core
        with core.ending_at_stop():
            try:
                async for raw in request_iterator:
                    yield await core.intake.take_raw(raw)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not core.stopping.is_set() or task is None:
                    raise
                task.uncancel()
                raise Draining("The coordinator is shutting down: report again when it is back.") from None

    async def LocateChunks(self, request: pb.LocateChunksRequest, context: Any) -> pb.LocateChunksResponse:
        return await self._questions.locate(request)

    async def MatchBlend(self, request: pb.MatchBlendRequest, context: Any) -> pb.MatchBlendResponse:
        return await self._questions.match_blend(request)

    async def ListChunks(self, request: pb.ListChunksRequest, context: Any) -> pb.ListChunksResponse:
        return self._questions.list_chunks(request)

    def WatchEvents(
        self, request: pb.WatchEventsRequest, context: Any
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        convert.check_server_id("server_id", request.server_id, empty=True)
        return self._core.events.follow(request.server_id)

    async def GetIntents(self, request: pb.GetIntentsRequest, context: Any) -> pb.GetIntentsResponse:
        return self._core.intentions.all()

    async def GetDirectoryStats(
        self, request: pb.GetDirectoryStatsRequest, context: Any
    ) -> pb.GetDirectoryStatsResponse:
        core, fleet = self._core, self._fleet
        sizes, gate, intake = fleet.directory.stats(), fleet.stats, core.intake.stats
        return pb.GetDirectoryStatsResponse(
            keys=sizes.keys,
            placements=sizes.placements,
            placement_bytes=sizes.placement_bytes,
            admitted_batches=gate.admitted,
            duplicate_batches=gate.duplicates,
            stale_batches=gate.stale,
            gaps=gate.gaps,
            resyncs=gate.resyncs,
            refused_batches=gate.refused,
            applied_events=intake.events,
            skipped_events=intake.skipped,
            chunk_size=fleet.members.chunk_size,
            blend_chunks=len(fleet.blend) if fleet.blend is not None else 0,
            blend_enabled=core.config.enable_blend_lookup,
            holdings=[
                pb.HoldingStats(**convert.holding_fields(each)) for each in fleet.directory.holding_stats()
            ],
            coordinator_incarnation=core.incarnation,
            coordinator_version=server_version(),
            sources=core.sources,
            checkpoint=core.checkpoint,
        )


def add_to_server(servicer: CoordinatorService, server: Any) -> None:
    """As the generated function, but batches are not parsed before their turn."""
    raw: Any = _RawReports(server)
    coordinator_service_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, raw)


class _RawReports:
    """Stands where generated code expects a server."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        known = handlers["ReportEvents"]
        handlers["ReportEvents"] = grpc.stream_stream_rpc_method_handler(
            known.stream_stream, bytes, known.response_serializer
        )
        self._server.add_registered_method_handlers(service, handlers)


def _check_room(core: Core, server_id: str) -> None:
    members = core.fleet.members
    if len(members) >= MAX_MEMBERS and members.get(server_id) is None:
        raise Overloaded(
            f"The fleet has {MAX_MEMBERS} members, and more are not allowed.",
            in_flight=len(members),
            allowed=MAX_MEMBERS,
        )


def _refuse_new(core: Core) -> None:
    if core.stopping.is_set():
        raise Draining("The coordinator is shutting down: register again when it is back.")
