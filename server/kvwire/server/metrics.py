"""What /metrics exports. docs/metrics.md describes each name; a test compares the two and the dashboards.

The domain counts for itself and is read at a scrape, so that no request pays for it. RPCs are counted
by `RpcMetrics`, on the event loop alone, without locks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric as Family

    from kvwire.server.status import EngineStatus

RPC_BUCKETS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
OPEN_STREAMS: Final = frozenset({"Attach", "SubscribeKvEvents"})
"""Held open for a client's life: counted when they end, without a duration."""


class RpcMetrics(Collector):
    """Is told of every finished call (a `CallObserver`), and exports counts and durations."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], int] = {}
        self._buckets: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}

    def __call__(self, method: str, code: str, seconds: float) -> None:
        self._calls[method, code] = self._calls.get((method, code), 0) + 1
        if method in OPEN_STREAMS:
            return
        buckets = self._buckets.get(method)
        if buckets is None:
            buckets = self._buckets[method] = [0] * (len(RPC_BUCKETS_S) + 1)
        buckets[bisect_left(RPC_BUCKETS_S, seconds)] += 1
        self._seconds[method] = self._seconds.get(method, 0.0) + seconds

    def collect(self) -> Iterator[Family]:
        calls = CounterMetricFamily(
            "kvwire_rpc_calls", "Finished RPCs by method and gRPC code.", labels=("method", "code")
        )
        for (method, code), count in self._calls.items():
            calls.add_metric((method, code), count)
        yield calls
        durations = HistogramMetricFamily(
            "kvwire_rpc_duration_seconds",
            "Time from the arrival of a call to its answer, by method.",
            labels=("method",),
        )
        for method, buckets in self._buckets.items():
            durations.add_metric((method,), _cumulative(buckets), self._seconds[method])
        yield durations


def _cumulative(buckets: list[int]) -> list[tuple[str, float]]:
    total = 0
    bounds = []
    for bound, count in zip((*map(str, RPC_BUCKETS_S), "+Inf"), buckets, strict=True):
        total += count
        bounds.append((bound, float(total)))
    return bounds


@dataclass(frozen=True, slots=True)
class ServerState:
    """What a scrape reads beside the RPCs. `rejected` counts calls refused for load."""

    engine: EngineStatus
    calls_in_flight: int = 0
    rejected: int = 0
    task_deaths: int = 0
    draining: bool = False


Samples = float | Mapping[Any, float]
Kind = Literal["counter", "gauge"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported name. `read` gives a number, or with a `label` a number for each of its values."""

    name: str
    kind: Kind
    text: str
    read: Callable[[ServerState], Samples]
    label: str = ""

    def family(self, state: ServerState) -> Family:
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        samples = self.read(state)
        if not isinstance(samples, Mapping):
            return make(self.name.removesuffix("_total"), self.text, value=samples)
        family = make(self.name.removesuffix("_total"), self.text, labels=(self.label,))
        for value, number in samples.items():
            family.add_metric((str(value),), number)
        return family


def counter(name: str, text: str, read: Callable[[ServerState], Samples], label: str = "") -> Metric:
    return Metric(name, "counter", text, read, label)


def gauge(name: str, text: str, read: Callable[[ServerState], Samples], label: str = "") -> Metric:
    return Metric(name, "gauge", text, read, label)


SERVER_METRICS: Final[tuple[Metric, ...]] = (
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
        "Tokens found, by tier, counted at the lookup.",
        lambda s: {"memory": s.engine.counters.hit_tokens},
        "tier",
    ),
    counter(
        "kvwire_lookup_missed_tokens_total",
        "Tokens not found in any tier.",
        lambda s: s.engine.counters.miss_tokens,
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
    gauge("kvwire_chunks", "Chunks with at least one object.", lambda s: s.engine.l1.chunks),
    gauge("kvwire_objects", "Resident objects.", lambda s: s.engine.l1.objects),
    gauge(
        "kvwire_chunk_size_tokens",
        "The bound chunk size; 0 before negotiation.",
        lambda s: s.engine.chunk_size,
    ),
    gauge("kvwire_draining", "1 while the server takes no new work.", lambda s: float(s.draining)),
    counter(
        "kvwire_background_task_deaths_total",
        "Background tasks that died; the server is not serving from the first on.",
        lambda s: s.task_deaths,
    ),
)


class StateCollector(Collector):
    """Reads the server's state when somebody scrapes."""

    def __init__(self, read: Callable[[], ServerState], version: str, server_id: str) -> None:
        self._read = read
        self._labels = (version, server_id)

    def collect(self) -> Iterator[Family]:
        state = self._read()
        for metric in SERVER_METRICS:
            yield metric.family(state)
        build = GaugeMetricFamily(
            "kvwire_build_info", "Always 1; tells who this is.", labels=("version", "server_id")
        )
        build.add_metric(self._labels, 1)
        yield build

    def describe(self) -> Iterable[Family]:
        """Nothing, so that registering does not read a state that is still being built."""
        return ()


def server_registry(
    rpcs: RpcMetrics, read: Callable[[], ServerState], *, version: str, server_id: str
) -> CollectorRegistry:
    """A registry of its own: one process may hold several servers, and an engine its own metrics."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(rpcs)
    registry.register(StateCollector(read, version, server_id))
    return registry
