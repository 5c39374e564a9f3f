"""What GetStatus tells: the state of a server's parts as messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.timestamp_pb2 import Timestamp

from kvwire.server import convert
from kvwire.serving.version import server_version
from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import error_reason_pb2, event_pb2, layout_pb2, namespace_pb2

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
    from kvwire.server.tiers.counters import TierStatus


def status_reply(core: Core) -> admin.GetStatusResponse:
    status = core.engine.status()
    return admin.GetStatusResponse(
        header=core.header,
        server_version=server_version(),
        server_id=core.server_id,
        started_at=_timestamp(core.started_at),
        addresses=core.addresses,
        data_paths=[convert.PATHS[name] for name in core.plane.paths],
        chunk_size=_chunk_size(core),
        memory=_memory(status.l1),
        leases=_leases(status.leases),
        sessions=status.sessions,
        registrations=_registrations(core, status),
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
        tiers=[_tier(each) for each in core.tiers.status()],
        sharing=core.sharing.status() if core.sharing is not None else None,
    )


def _chunk_size(core: Core) -> admin.ChunkSizeStatus:
    binding = core.binding.status()
    chosen = binding.chosen
    return admin.ChunkSizeStatus(
        chunk_size=chosen.chunk_size if chosen and binding.complete else 0,
        minimum=binding.minimum,
        maximum=binding.maximum,
        alignment=chosen.alignment if chosen else 0,
        bound_by=chosen.bound_by if chosen else "",
        binders=[admin.BinderStatus(name=each.name, bound=each.state == "bound") for each in binding.binders],
        sessions_started=binding.sessions_started,
    )


def _registrations(core: Core, status: EngineStatus) -> Iterator[admin.RegistrationStatus]:
    now = core.now()
    for each in status.registrations:
        yield _registration(core, each, now)


def _registration(core: Core, each: RegistrationStatus, now: float) -> admin.RegistrationStatus:
    client = core.clients.get(each.registration_id)
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


def _tier(tier: TierStatus) -> admin.TierStatus:
    counters = tier.counters
    return admin.TierStatus(
        tier=event_pb2.STORAGE_TIER_L2,
        backend=tier.name,
        location=tier.location,
        capacity_bytes=tier.capacity_bytes,
        used_bytes=tier.used_bytes,
        chunks=tier.chunks,
        objects=tier.objects,
        store=tier.store,
        encrypted=tier.encrypted,
        queued_objects=tier.queued_objects,
        written_objects=counters.written_objects,
        written_bytes=counters.written_bytes,
        read_objects=counters.read_objects,
        read_bytes=counters.read_bytes,
        failed_writes=counters.failed_writes,
        failed_reads=counters.failed_reads,
        damaged_objects=counters.damaged_objects,
        evicted_chunks=tier.evicted_chunks,
        skipped_objects=counters.skipped_objects,
        problem=tier.problem,
    )


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
        pinned_chunks=l1.pinned_chunks,
        pinned_bytes=l1.pinned_bytes,
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
        l2_hit_tokens=counters.l2_hit_tokens,
        peer_hit_tokens=counters.peer_hit_tokens,
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
