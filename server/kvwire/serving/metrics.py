"""What /metrics is made of: RPCs as they end, and a program's state as it is when somebody scrapes.

The domain counts for itself, so that no request pays for it. RPCs are counted by `RpcMetrics`, on the event
loop alone, without locks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from prometheus_client.core import Metric as Family

S = TypeVar("S")

RPC_BUCKETS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)


class RpcMetrics(Collector):
    """Is told of every finished call (a `CallObserver`), and exports counts and durations.

    `open_streams` are held open for a client's life: counted when they end, without a duration.
    """

    def __init__(self, open_streams: frozenset[str] = frozenset()) -> None:
        self._open_streams = open_streams
        self._calls: dict[tuple[str, str], int] = {}
        self._buckets: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}

    def __call__(self, method: str, code: str, seconds: float) -> None:
        self._calls[method, code] = self._calls.get((method, code), 0) + 1
        if method in self._open_streams:
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


Samples = float | Mapping[Any, float]
Kind = Literal["counter", "gauge"]


@dataclass(frozen=True, slots=True)
class Metric(Generic[S]):
    """One exported name. `read` gives a number, or with a `label` a number for each of its values."""

    name: str
    kind: Kind
    text: str
    read: Callable[[S], Samples]
    label: str = ""

    def family(self, state: S) -> Family:
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        samples = self.read(state)
        if not isinstance(samples, Mapping):
            return make(self.name.removesuffix("_total"), self.text, value=samples)
        family = make(self.name.removesuffix("_total"), self.text, labels=(self.label,))
        for value, number in samples.items():
            family.add_metric((str(value),), number)
        return family


def counter(name: str, text: str, read: Callable[[S], Samples], label: str = "") -> Metric[S]:
    return Metric(name, "counter", text, read, label)


def gauge(name: str, text: str, read: Callable[[S], Samples], label: str = "") -> Metric[S]:
    return Metric(name, "gauge", text, read, label)


class StateCollector(Collector, Generic[S]):
    """Reads the server's state when somebody scrapes."""

    def __init__(
        self, read: Callable[[], S], metrics: Sequence[Metric[S]], version: str, server_id: str
    ) -> None:
        self._read = read
        self._metrics = metrics
        self._labels = (version, server_id)

    def collect(self) -> Iterator[Family]:
        state = self._read()
        for metric in self._metrics:
            yield metric.family(state)
        build = GaugeMetricFamily(
            "kvwire_build_info", "Always 1; tells who this is.", labels=("version", "server_id")
        )
        build.add_metric(self._labels, 1)
        yield build

    def describe(self) -> Iterable[Family]:
        """Nothing, so that registering does not read a state that is still being built."""
        return ()


def program_registry(
    rpcs: RpcMetrics, metrics: Sequence[Metric[S]], read: Callable[[], S], *, version: str, server_id: str
) -> CollectorRegistry:
    """A registry of its own: one process may hold several servers, and an engine its own metrics."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(rpcs)
    registry.register(StateCollector(read, metrics, version, server_id))
    return registry
