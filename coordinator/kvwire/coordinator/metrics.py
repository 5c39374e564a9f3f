"""What /metrics exports. docs/metrics.md describes each name; a test compares the two and the dashboard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvwire.coordinator.service import OPEN_STREAMS
from kvwire.serving.metrics import Metric, RpcMetrics, gauge, program_registry

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from kvwire.coordinator.core import Core

__all__ = ["METRICS", "OPEN_STREAMS", "coordinator_registry"]

METRICS: Final[tuple[Metric[Core], ...]] = (
    gauge(
        "kvwire_rpc_in_flight", "RPCs being served that count against the limit.", lambda c: c.guard.in_flight
    ),
)


def coordinator_registry(rpcs: RpcMetrics, core: Core, *, version: str, name: str) -> CollectorRegistry:
    return program_registry(rpcs, METRICS, lambda: core, version=version, server_id=name)
