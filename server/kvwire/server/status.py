from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvwire.keys import Namespace
    from kvwire.server.layout import KvLayout
    from kvwire.server.messages import LeaseKind, Role
    from kvwire.server.registry import LayoutRecord, Registration
    from kvwire.server.sessions import Session
    from kvwire.server.store import L1Store, Space


@dataclass(slots=True)
class EngineCounters:
    """What happened since the start; only ever grows. Bytes are those of objects, without alignment.

    `lookups` are answered ones of registered clients. Tokens count in whole chunks, once per session however
    often it is looked up: asked = hit + miss, and hits that were brought from a lower tier or a peer count
    there as well. Retrieved is what was granted for reading under leases that
    were held to their end. `failures` counts by reason.
    """

    lookups: int = 0
    dry_lookups: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    miss_tokens: int = 0
    l2_hit_tokens: int = 0
    peer_hit_tokens: int = 0
    stored_objects: int = 0
    retrieved_objects: int = 0
    stored_bytes: dict[str, int] = field(default_factory=dict)
    retrieved_bytes: dict[str, int] = field(default_factory=dict)
    aborted_slots: int = 0
    expired_leases: int = 0
    surplus_releases: int = 0
    evicted_chunks: int = 0
    evicted_bytes: int = 0
    quota_evicted_chunks: int = 0
    quota_refusals: int = 0
    failures: dict[str, int] = field(default_factory=dict)

    def fail(self, reason: str, count: int = 1) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + count


@dataclass(frozen=True, slots=True)
class L1Status:
    """`used_bytes` is the sum of resident, reserved and quarantined bytes, as allocated."""

    policy: str
    capacity_bytes: int
    used_bytes: int
    resident_bytes: int
    reserved_bytes: int
    quarantined_bytes: int
    evictable_bytes: int
    chunks: int
    objects: int
    pinned_chunks: int = 0
    pinned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RegistrationStatus:
    registration_id: int
    engine_id: str
    name: str
    role: Role
    kv_rank: int
    pid: int
    data_path: str
    last_seen: float


@dataclass(frozen=True, slots=True)
class NamespaceStatus:
    """A base namespace that somebody has registered a layout for."""

    namespace: Namespace
    layout: KvLayout
    registrations: int


@dataclass(frozen=True, slots=True)
class SpaceStatus:
    """A namespace that has chunks. `tenant` is a digest of its salt, empty without one."""

    model: str
    tenant: str
    root: bytes
    chunks: int
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """`waiting_leases` have ended and wait for an owner or a data path to let their memory go."""

    chunk_size: int
    l1: L1Status
    leases: dict[LeaseKind, int]
    waiting_leases: int
    sessions: int
    registrations: tuple[RegistrationStatus, ...]
    namespaces: tuple[NamespaceStatus, ...]
    spaces: tuple[SpaceStatus, ...]
    counters: EngineCounters


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """`tenant` is a digest of the salt; `lease_id` is 0 and `leased_chunks` 0 without a lookup lease."""

    generation: int
    engine_id: str
    session_id: str
    chunks: int
    tenant: str
    lease_id: int
    leased_chunks: int
    idle: float


def l1_status(store: L1Store) -> L1Status:
    return L1Status(
        policy=store.policy.name,
        capacity_bytes=store.allocator.capacity,
        used_bytes=store.allocator.used,
        resident_bytes=store.resident_bytes,
        reserved_bytes=store.reserved_bytes,
        quarantined_bytes=store.quarantined_bytes,
        evictable_bytes=store.evictable_bytes,
        chunks=len(store),
        objects=store.resident_objects,
        pinned_chunks=store.key_pins.chunks,
        pinned_bytes=store.key_pins.bytes,
    )


def registration_status(registration: Registration) -> RegistrationStatus:
    client = registration.client
    return RegistrationStatus(
        registration_id=registration.id,
        engine_id=client.engine_id,
        name=client.name,
        role=client.role,
        kv_rank=client.kv_rank,
        pid=client.pid,
        data_path=registration.data_path,
        last_seen=registration.last_seen,
    )


def namespace_status(record: LayoutRecord) -> NamespaceStatus:
    return NamespaceStatus(record.namespace, record.shards.layout, len(record.users))


def session_status(session: Session, now: float) -> SessionStatus:
    lease = session.lease
    return SessionStatus(
        generation=session.generation,
        engine_id=session.engine_id,
        session_id=session.session_id,
        chunks=len(session.keys),
        tenant=session.space.tenant,
        lease_id=lease.id if lease else 0,
        leased_chunks=lease.held if lease else 0,
        idle=now - session.last_used,
    )


def space_status(space: Space) -> SpaceStatus:
    return SpaceStatus(space.model, space.tenant, space.root, space.chunks, space.resident_bytes)
