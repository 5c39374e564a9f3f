"""What /metrics exports. docs/metrics.md describes each name; a test compares the two and the dashboard."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from kvwire.coordinator.intake import LAG_BUCKETS_S
from kvwire.coordinator.messages import Reporting
from kvwire.serving.metrics import Metric, RpcMetrics, counter, gauge, program_registry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family

    from kvwire.coordinator.core import Core
    from kvwire.coordinator.intake import IntakeStats


def _members(core: Core) -> Mapping[str, float]:
    counts = dict.fromkeys(Reporting, 0)
    for view in core.fleet.views(core.now()):
        counts[view.reporting] += 1
    return {str(state): count for state, count in counts.items()}


def _batches(core: Core) -> Mapping[str, float]:
    gate = core.fleet.stats
    return {
        "admitted": gate.admitted,
        "duplicate": gate.duplicates,
        "stale": gate.stale,
        "refused": gate.refused,
    }


METRICS: Final[tuple[Metric[Core], ...]] = (
    gauge(
        "kvwire_rpc_in_flight", "RPCs being served that count against the limit.", lambda c: c.guard.in_flight
    ),
    counter(
        "kvwire_rpc_rejected_total",
        "RPCs refused because too many were in flight.",
        lambda c: c.guard.rejected,
    ),
    gauge("kvwire_draining", "1 while no new work is taken.", lambda c: float(c.guard.draining)),
    counter(
        "kvwire_background_task_deaths_total",
        "Background tasks that died; the program is not serving from the first on.",
        lambda c: c.supervisor.deaths,
    ),
    gauge("kvwire_coordinator_members", "Members by whether their events arrive.", _members, "reporting"),
    gauge(
        "kvwire_coordinator_members_apart",
        "Members that do not fit the fleet: another chunk size or digest.",
        lambda c: sum(bool(each.sharing_problem) for each in c.fleet.members.all()),
    ),
    counter(
        "kvwire_coordinator_event_batches_total",
        "Event batches by what became of them.",
        _batches,
        "admission",
    ),
    counter(
        "kvwire_coordinator_source_batches_total",
        "Event batches of members by the way that they came.",
        lambda c: dict.fromkeys(c.sources, 0) | dict(c.intake.stats.batches),
        "source",
    ),
    counter(
        "kvwire_coordinator_events_total", "Entries of applied batches.", lambda c: c.intake.stats.events
    ),
    counter(
        "kvwire_coordinator_skipped_events_total",
        "Entries of unknown kind or outside the contract.",
        lambda c: c.intake.stats.skipped,
    ),
    counter("kvwire_coordinator_gaps_total", "Gaps seen.", lambda c: c.fleet.stats.gaps),
    counter(
        "kvwire_coordinator_resyncs_total",
        "Snapshots pulled, those of new members included.",
        lambda c: c.fleet.stats.resyncs,
    ),
    counter(
        "kvwire_coordinator_failed_snapshots_total",
        "Snapshots that could not be pulled.",
        lambda c: c.failed_pulls,
    ),
    gauge(
        "kvwire_coordinator_worst_event_lag_seconds",
        "The oldest of the members' last batches, as it was when it arrived.",
        lambda c: c.intake.worst_lag,
    ),
    gauge(
        "kvwire_coordinator_kafka_lag_records",
        "Records of the topic that were not read yet.",
        lambda c: c.kafka_lag,
    ),
    gauge("kvwire_coordinator_keys", "Chunk keys.", lambda c: c.fleet.directory.stats().keys),
    gauge("kvwire_coordinator_placements", "Placements.", lambda c: c.fleet.directory.stats().placements),
    gauge(
        "kvwire_coordinator_placement_bytes",
        "Size of what is placed.",
        lambda c: c.fleet.directory.stats().placement_bytes,
    ),
    gauge(
        "kvwire_coordinator_unswept_placements",
        "Fenced placements whose memory is not free yet.",
        lambda c: c.fleet.directory.stats().unswept,
    ),
    gauge(
        "kvwire_coordinator_watchers",
        "Open watches.",
        lambda c: {"servers": len(c.servers), "events": len(c.events)},
        "kind",
    ),
    gauge(
        "kvwire_coordinator_chunk_size_tokens",
        "The fleet's chunk size; 0 while no member has one.",
        lambda c: c.fleet.members.chunk_size,
    ),
    gauge(
        "kvwire_coordinator_blend_chunks",
        "Chunks in the blend index.",
        lambda c: len(c.fleet.blend) if c.fleet.blend is not None else 0,
    ),
    gauge(
        "kvwire_coordinator_blend_bytes",
        "Memory of the blend index.",
        lambda c: c.fleet.blend.size_bytes if c.fleet.blend is not None else 0,
    ),
)


class EventLag(Collector):
    """How old batches were when they arrived, by the two wall clocks."""

    def __init__(self, stats: IntakeStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Family]:
        family = HistogramMetricFamily(
            "kvwire_coordinator_event_lag_seconds", "From the closing of a batch to its arrival."
        )
        bounds = (*map(str, LAG_BUCKETS_S), "+Inf")
        family.add_metric(
            (), list(zip(bounds, accumulate(self._stats.lags), strict=True)), self._stats.lag_sum
        )
        yield family

    def describe(self) -> Iterable[Family]:
        return ()


def coordinator_registry(rpcs: RpcMetrics, core: Core, *, version: str, name: str) -> CollectorRegistry:
    registry = program_registry(rpcs, METRICS, lambda: core, version=version, server_id=name)
    registry.register(EventLag(core.intake.stats))
    return registry
