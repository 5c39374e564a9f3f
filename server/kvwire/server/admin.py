"""AdminService: what operators see. Methods that come with tiers and quotas answer NOT_SERVED."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.timestamp_pb2 import Timestamp

from kvwire.errors import InvalidArgument
from kvwire.server import convert
from kvwire.server.pinning import selected_keys
from kvwire.server.unserved import not_served
from kvwire.serving.version import server_version
from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import admin_service_pb2_grpc, error_reason_pb2, event_pb2, layout_pb2, namespace_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.keys import Namespace
    from kvwire.server.core import Core
    from kvwire.server.journal import Journal
    from kvwire.server.layout import KvLayout
    from kvwire.server.membership import LinkState
    from kvwire.server.messages import LeaseKind
    from kvwire.server.refusals import Refusal
    from kvwire.server.reporting.kafka import KafkaReporter
    from kvwire.server.status import EngineCounters, EngineStatus, L1Status, RegistrationStatus

log = logging.getLogger("kvwire.server")

DEFAULT_PAGE: Final = 100
MAX_PAGE: Final = 1000
MAX_PAGE_TOKEN: Final = 20
MEMORY_TIERS: Final = (event_pb2.STORAGE_TIER_UNSPECIFIED, event_pb2.STORAGE_TIER_L1)


class AdminService(admin_service_pb2_grpc.AdminServiceServicer):
    def __init__(self, core: Core) -> None:
        self._core = core

    async def GetStatus(self, request: admin.GetStatusRequest, context: Any) -> admin.GetStatusResponse:
        core = self._core
        core.absorb()
        status = core.engine.status()
        return admin.GetStatusResponse(
            header=core.header,
            server_version=server_version(),
            server_id=core.server_id,
            started_at=_timestamp(core.started_at),
            addresses=core.addresses,
            data_paths=[convert.PATHS[name] for name in core.plane.paths],
            chunk_size=self._chunk_size(),
            memory=_memory(status.l1),
            leases=_leases(status.leases),
            sessions=status.sessions,
            registrations=self._registrations(status),
            namespaces=[
                admin.NamespaceStatus(
                    namespace=_namespace(each.namespace),
                    layout=_layout(each.layout),
                    registrations=each.registrations,
                )
                for each in status.namespaces
            ],
            counters=_counters(status.counters),
            tasks=[
                admin.TaskStatus(name=task.name, running=task.running, error=task.error)
                for task in core.supervisor.states()
            ],
            draining=core.guard.draining,
            refused=[_refused(each, core.now()) for each in core.refusals.recent()],
            coordinators=[_link(state, arrived, core.now()) for state, arrived in core.fleet.states()],
            events=_journal(core.journal, core.fleet.kafka),
        )

    async def ListSessions(
        self, request: admin.ListSessionsRequest, context: Any
    ) -> admin.ListSessionsResponse:
        start = _page_start(request.page_token)
        size = min(request.page_size or DEFAULT_PAGE, MAX_PAGE)
        now = self._core.now()
        listed = self._core.engine.sessions(start, size + 1, now)
        more = len(listed) > size
        return admin.ListSessionsResponse(
            header=self._core.header,
            sessions=[
                admin.SessionStatus(
                    engine_id=each.engine_id,
                    session_id=each.session_id,
                    chunks=each.chunks,
                    tenant=each.tenant,
                    lease_id=each.lease_id,
                    leased_chunks=each.leased_chunks,
                    idle=convert.duration(each.idle),
                )
                for each in listed[:size]
            ],
            next_page_token=str(listed[size - 1].generation) if more else "",
        )

    async def Clear(self, request: admin.ClearRequest, context: Any) -> admin.ClearResponse:
        namespace = convert.namespace(request.namespace) if request.HasField("namespace") else None
        core = self._core
        core.absorb()
        # What is asked of a tier that this server does not have is done.
        cleared, kept = core.engine.clear(namespace) if request.tier in MEMORY_TIERS else (0, 0)
        log.info("cleared %d chunks, kept %d", cleared, kept)
        return admin.ClearResponse(header=core.header, cleared_chunks=cleared, kept_chunks=kept)

    async def Pin(self, request: admin.PinRequest, context: Any) -> admin.PinResponse:
        core = self._core
        pinned = await core.pinning.pin(await self._selected(request.selector))
        log.info("pinned %d chunks", pinned)
        return admin.PinResponse(header=core.header, pinned_chunks=pinned)

    async def Unpin(self, request: admin.UnpinRequest, context: Any) -> admin.UnpinResponse:
        core = self._core
        unpinned = await core.pinning.unpin(await self._selected(request.selector))
        log.info("unpinned %d chunks", unpinned)
        return admin.UnpinResponse(header=core.header, unpinned_chunks=unpinned)

    ListObjects: Any = not_served("ListObjects")
    SetQuota: Any = not_served("SetQuota")
    GetQuota: Any = not_served("GetQuota")
    Prefetch: Any = not_served("Prefetch")
    Evict: Any = not_served("Evict")

    async def _selected(self, selector: admin.PromptSelector) -> tuple[bytes, ...]:
        core = self._core
        # Keys need no chunk size.
        chunk_size = core.binding.require() if selector.WhichOneof("prompt") == "tokens" else 0
        return await selected_keys(selector, chunk_size, core.config)

    def _chunk_size(self) -> admin.ChunkSizeStatus:
        binding = self._core.binding.status()
        chosen = binding.chosen
        return admin.ChunkSizeStatus(
            chunk_size=chosen.chunk_size if chosen and binding.complete else 0,
            minimum=binding.minimum,
            maximum=binding.maximum,
            alignment=chosen.alignment if chosen else 0,
            bound_by=chosen.bound_by if chosen else "",
            binders=[
                admin.BinderStatus(name=each.name, bound=each.state == "bound") for each in binding.binders
            ],
            sessions_started=binding.sessions_started,
        )

    def _registrations(self, status: EngineStatus) -> Iterator[admin.RegistrationStatus]:
        now = self._core.now()
        for each in status.registrations:
            yield self._registration(each, now)

    def _registration(self, each: RegistrationStatus, now: float) -> admin.RegistrationStatus:
        client = self._core.clients.get(each.registration_id)
        return admin.RegistrationStatus(
            registration_id=each.registration_id,
            engine_id=each.engine_id,
            client_name=each.name,
            role=convert.ROLE_NUMBERS[each.role],
            kv_rank=each.kv_rank,
            path=convert.PATHS[each.data_path],
            path_reason=client.path_reason if client else "",
            attached=client is not None and client.attached,
            idle=convert.duration(now - each.last_seen),
        )


def _page_start(token: str) -> int:
    if token and not (token.isdecimal() and len(token) <= MAX_PAGE_TOKEN):
        raise InvalidArgument("page_token", "is not one that this server gave")
    return int(token or 0)


def _timestamp(seconds: float) -> Timestamp:
    return Timestamp(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))


def _refused(each: Refusal, now: float) -> admin.RefusedClient:
    return admin.RefusedClient(
        client_name=each.client_name,
        reason=error_reason_pb2.ErrorReason.Value(f"ERROR_REASON_{each.reason}"),
        message=each.message,
        times=each.times,
        idle=convert.duration(now - each.last),
    )


def _memory(l1: L1Status) -> admin.MemoryStatus:
    return admin.MemoryStatus(
        capacity_bytes=l1.capacity_bytes,
        used_bytes=l1.used_bytes,
        reserved_bytes=l1.reserved_bytes,
        quarantined_bytes=l1.quarantined_bytes,
        chunks=l1.chunks,
        objects=l1.objects,
        policy=l1.policy,
    )


def _leases(counts: dict[LeaseKind, int]) -> admin.LeaseCounts:
    return admin.LeaseCounts(**{kind.value: count for kind, count in counts.items()})


def _namespace(space: Namespace) -> namespace_pb2.Namespace:
    return namespace_pb2.Namespace(
        model=space.model,
        revision=space.revision,
        kv_dtype=space.kv_dtype,
        layout_fingerprint=space.layout_fingerprint,
    )


def _layout(layout: KvLayout) -> layout_pb2.KvLayout:
    return layout_pb2.KvLayout(
        world_size=layout.world_size,
        groups=[
            layout_pb2.KvGroup(
                kind=convert.KIND_NUMBERS[group.kind],
                span_tokens=group.span_tokens,
                window_tokens=group.window_tokens,
                num_layers=group.num_layers,
                block_bytes=group.block_bytes,
                blocks_per_object=group.blocks_per_object,
            )
            for group in layout.groups
        ],
    )


def _counters(counters: EngineCounters) -> admin.CacheCounters:
    paths = sorted(set(counters.stored_bytes) | set(counters.retrieved_bytes))
    return admin.CacheCounters(
        lookups=counters.lookups,
        asked_tokens=counters.asked_tokens,
        hit_tokens=counters.hit_tokens,
        stored_objects=counters.stored_objects,
        retrieved_objects=counters.retrieved_objects,
        aborted_slots=counters.aborted_slots,
        evicted_chunks=counters.evicted_chunks,
        evicted_bytes=counters.evicted_bytes,
        expired_leases=counters.expired_leases,
        surplus_releases=counters.surplus_releases,
        paths=[
            admin.PathCounters(
                path=convert.PATHS[path],
                stored_bytes=counters.stored_bytes.get(path, 0),
                retrieved_bytes=counters.retrieved_bytes.get(path, 0),
            )
            for path in paths
        ],
    )


def _link(state: LinkState, arrived: int, now: float) -> admin.CoordinatorLink:
    answered = state.answered_at
    return admin.CoordinatorLink(
        address=state.address,
        registered=state.registered,
        problem=state.problem,
        sharing_problem=state.sharing_problem,
        heartbeat_age=convert.duration(now - answered) if answered is not None else None,
        reporting=state.reporting,
        acknowledged_sequence=arrived,
    )


def _journal(journal: Journal | None, kafka: KafkaReporter | None) -> admin.JournalStatus | None:
    if journal is None:
        return None
    return admin.JournalStatus(
        closed_sequence=journal.closed_sequence,
        held_batches=journal.held_batches,
        held_bytes=journal.held_bytes,
        dropped_batches=journal.dropped_batches,
        kafka_topic=kafka.topic if kafka else "",
        kafka_sequence=kafka.arrived if kafka else 0,
        kafka_problem=kafka.problem if kafka else "",
    )
