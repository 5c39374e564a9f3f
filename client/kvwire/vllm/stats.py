"""The connector's numbers in vLLM's own log and `/metrics`. See docs/metrics.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvwire.vllm.tally import COUNTERS, DURATIONS, USABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX: Final = "vllm:kvwire_"
USABLE_TEXT: Final = "1 while the engine uses its kvwire servers, 0 while it goes on without them."
BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass
class KvwireStats(KVConnectorStats):
    """What tallies took, merged: counts are added, durations appended; of `usable` the last word holds."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            if name == USABLE:
                self.data[name] = value
            elif name in self.data:
                self.data[name] = self.data[name] + value
            else:
                self.data[name] = value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log: counts as they are, and of durations the mean in milliseconds."""
        found: dict[str, int | float] = {}
        for name, value in self.data.items():
            if name in DURATIONS:
                found[f"mean {name.removesuffix('_seconds')} ms"] = round(1e3 * sum(value) / len(value), 3)
            else:
                found[name.replace("_", " ")] = value
        return found


class KvwirePromMetrics(KVConnectorPromMetrics):
    """Registers the metrics in vLLM's registry, one child for each engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge, histogram = metric_types[Counter], metric_types[Gauge], metric_types[Histogram]
        self._counters = {
            name: self._children(counter(f"{PREFIX}{name}", text, labelnames=labelnames))
            for name, text in COUNTERS.items()
        }
        self._durations = {
            name: self._children(
                histogram(f"{PREFIX}{name}", text, labelnames=labelnames, buckets=list(BUCKETS))
            )
            for name, text in DURATIONS.items()
        }
        self._usable = self._children(
            gauge(f"{PREFIX}{USABLE}", USABLE_TEXT, labelnames=labelnames, multiprocess_mode="mostrecent")
        )

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
            elif name in self._durations:
                for seconds in value:
                    self._durations[name][engine_idx].observe(seconds)
            elif name == USABLE:
                self._usable[engine_idx].set(value)

    def _children(self, metric: Any) -> dict[int, Any]:
        return {index: metric.labels(*values) for index, values in self.per_engine_labelvalues.items()}
