"""What /metrics exports. docs/metrics.md describes each name; a test compares the two and the dashboards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvwire.server.fetch.prefetcher import FetchCounters
from kvwire.server.fetch.source import Origin
from kvwire.server.peers.metrics import PEER_METRICS, SharingFacts
from kvwire.server.tiers.metrics import TIER_METRICS
from kvwire.serving.metrics import Metric, RpcMetrics, counter, gauge, program_registry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prometheus_client import CollectorRegistry

    from kvwire.server.status import EngineCounters, EngineStatus
    from kvwire.server.tiers.counters import TierStatus

OPEN_STREAMS: Final = frozenset({"Attach", "SubscribeKvEvents"})
"""Held open for a client's life: counted when they end, without a duration."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """What a scrape reads beside the RPCs. `rejected` counts calls refused for load.

    `registered` and `reporting` are by the coordinator's address; `reporting` has those that events go to
    over gRPC. `journal_batches` and `journal_bytes` are held, `dropped_batches` counts.
    """

    engine: EngineStatus
    calls_in_flight: int = 0
    rejected: int = 0
    task_deaths: int = 0
    draining: bool = False
    registered: Mapping[str, bool] = field(default_factory=dict)
    reporting: Mapping[str, bool] = field(default_factory=dict)
    journal_batches: int = 0
    journal_bytes: int = 0
    dropped_batches: int = 0
    tiers: tuple[TierStatus, ...] = ()
    sharing: SharingFacts = field(default_factory=SharingFacts)
    fetched: FetchCounters = field(default_factory=FetchCounters)
    fetches: int = 0
    fetching_bytes: int = 0


def _hits(counters: EngineCounters) -> dict[str, float]:
    below, elsewhere = counters.l2_hit_tokens, counters.peer_hit_tokens
    return {
        Origin.MEMORY: counters.hit_tokens - below - elsewhere,
        Origin.L2: below,
        Origin.PEER: elsewhere,
    }


SERVER_METRICS: Final[tuple[Metric[ServerState], ...]] = (
    gauge(
        "kvwire_rpc_in_flight", "RPCs being served that count against the limit.", lambda s: s.calls_in_flight
    ),
    counter(
        "kvwire_rpc_rejected_total", "RPCs refused because too many were in flight.", lambda s: s.rejected
    ),
    counter("kvwire_lookups_total", "Lookups of registered clients.", lambda s: s.engine.counters.lookups),
    counter(
        "kvwire_dry_lookups_total",
        "Lookups without a registration, which lease nothing and count in no other lookup metric.",
        lambda s: s.engine.counters.dry_lookups,
    ),
    counter(
        "kvwire_lookup_asked_tokens_total",
        "Tokens in whole chunks that sessions asked for: the hits of all tiers and the misses.",
        lambda s: s.engine.counters.asked_tokens,
    ),
    counter(
        "kvwire_lookup_hit_tokens_total",
        "Tokens found, by where they were found, counted at the lookup.",
        lambda s: _hits(s.engine.counters),
        "tier",
    ),
    counter(
        "kvwire_lookup_missed_tokens_total",
        "Tokens not found anywhere.",
        lambda s: s.engine.counters.miss_tokens,
    ),
    counter(
        "kvwire_fetched_objects_total",
        "Objects brought into memory, by where they came from.",
        lambda s: s.fetched.objects,
        "origin",
    ),
    counter(
        "kvwire_fetched_bytes_total",
        "Bytes brought into memory, by where they came from.",
        lambda s: s.fetched.bytes,
        "origin",
    ),
    counter(
        "kvwire_fetch_failed_objects_total",
        "Objects that were found somewhere and could not be brought.",
        lambda s: s.fetched.failed_objects,
        "origin",
    ),
    counter(
        "kvwire_fetch_faults_total",
        "Errors of this program while something was brought; its log tells more.",
        lambda s: s.fetched.faults,
    ),
    gauge("kvwire_fetches", "Prompts that something is being brought for.", lambda s: s.fetches),
    gauge(
        "kvwire_fetching_bytes",
        "Bytes on their way into memory, as allocated.",
        lambda s: s.fetching_bytes,
    ),
    counter(
        "kvwire_stored_bytes_total",
        "Bytes committed, by data path.",
        lambda s: s.engine.counters.stored_bytes,
        "path",
    ),
    counter(
        "kvwire_retrieved_bytes_total",
        "Bytes read under leases that were held to their end, by data path.",
        lambda s: s.engine.counters.retrieved_bytes,
        "path",
    ),
    counter("kvwire_stored_objects_total", "Objects committed.", lambda s: s.engine.counters.stored_objects),
    counter(
        "kvwire_retrieved_objects_total",
        "Objects read under leases that were held to their end.",
        lambda s: s.engine.counters.retrieved_objects,
    ),
    counter(
        "kvwire_aborted_slots_total",
        "Reserved slots given back unpublished.",
        lambda s: s.engine.counters.aborted_slots,
    ),
    counter("kvwire_evicted_chunks_total", "Chunks evicted.", lambda s: s.engine.counters.evicted_chunks),
    counter("kvwire_evicted_bytes_total", "Bytes evicted.", lambda s: s.engine.counters.evicted_bytes),
    counter(
        "kvwire_quota_evicted_chunks_total",
        "Chunks evicted because of a tenant's quota.",
        lambda s: s.engine.counters.quota_evicted_chunks,
    ),
    counter(
        "kvwire_quota_refused_objects_total",
        "Objects that had no room in their tenant's quota.",
        lambda s: s.engine.counters.quota_refusals,
    ),
    counter(
        "kvwire_expired_leases_total", "Leases that ran out.", lambda s: s.engine.counters.expired_leases
    ),
    counter(
        "kvwire_surplus_releases_total",
        "Releases of what was not held (any more).",
        lambda s: s.engine.counters.surplus_releases,
    ),
    counter(
        "kvwire_failures_total",
        "Failures by error reason, those of single batch items included.",
        lambda s: s.engine.counters.failures,
        "reason",
    ),
    gauge("kvwire_leases", "Live leases by kind.", lambda s: s.engine.leases, "kind"),
    gauge(
        "kvwire_waiting_leases",
        "Ended leases whose memory waits for an owner or a data path to let go.",
        lambda s: s.engine.waiting_leases,
    ),
    gauge("kvwire_sessions", "Live sessions.", lambda s: s.engine.sessions),
    gauge("kvwire_registrations", "Registered clients.", lambda s: len(s.engine.registrations)),
    gauge("kvwire_memory_capacity_bytes", "Size of the memory tier.", lambda s: s.engine.l1.capacity_bytes),
    gauge(
        "kvwire_memory_used_bytes",
        "Resident, reserved and quarantined bytes together.",
        lambda s: s.engine.l1.used_bytes,
    ),
    gauge("kvwire_memory_resident_bytes", "Bytes of readable objects.", lambda s: s.engine.l1.resident_bytes),
    gauge("kvwire_memory_reserved_bytes", "Bytes under write leases.", lambda s: s.engine.l1.reserved_bytes),
    gauge(
        "kvwire_memory_quarantined_bytes",
        "Bytes that a former writer may still touch.",
        lambda s: s.engine.l1.quarantined_bytes,
    ),
    gauge(
        "kvwire_memory_evictable_bytes",
        "Resident bytes that no lease or pin holds.",
        lambda s: s.engine.l1.evictable_bytes,
    ),
    gauge(
        "kvwire_memory_pinned_bytes",
        "Resident bytes that no eviction and no Clear takes.",
        lambda s: s.engine.l1.pinned_bytes,
    ),
    gauge("kvwire_chunks", "Chunks with at least one object.", lambda s: s.engine.l1.chunks),
    gauge("kvwire_objects", "Resident objects.", lambda s: s.engine.l1.objects),
    gauge(
        "kvwire_chunk_size_tokens",
        "The bound chunk size; 0 before negotiation.",
        lambda s: s.engine.chunk_size,
    ),
    gauge(
        "kvwire_coordinator_registered",
        "1 while this server is a member of the fleet, by coordinator.",
        lambda s: s.registered,
        "coordinator",
    ),
    gauge(
        "kvwire_coordinator_reporting",
        "1 while events go there over gRPC, by coordinator.",
        lambda s: s.reporting,
        "coordinator",
    ),
    gauge(
        "kvwire_event_journal_batches",
        "Batches of events that have not arrived everywhere.",
        lambda s: s.journal_batches,
    ),
    gauge("kvwire_event_journal_bytes", "Their size.", lambda s: s.journal_bytes),
    counter(
        "kvwire_event_batches_dropped_total",
        "Batches of events that were dropped before they arrived everywhere.",
        lambda s: s.dropped_batches,
    ),
    *TIER_METRICS,
    *PEER_METRICS,
    gauge("kvwire_draining", "1 while the server takes no new work.", lambda s: float(s.draining)),
    counter(
        "kvwire_background_task_deaths_total",
        "Background tasks that died; the server is not serving from the first on.",
        lambda s: s.task_deaths,
    ),
)


def server_registry(
    rpcs: RpcMetrics, read: Callable[[], ServerState], *, version: str, server_id: str
) -> CollectorRegistry:
    return program_registry(rpcs, SERVER_METRICS, read, version=version, server_id=server_id)
