"""How late life signs are, at rest and while bytes move."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvwire.cli.bench.coordinator.probe import summary
from kvwire.cli.bench.peer.fleet import HEARTBEAT_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvwire.cli.bench.peer.relay import Relay

Span = tuple[float, float]


@dataclass(slots=True)
class LifeSigns:
    """Seconds that each one came later than the interval after the one before."""

    idle: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    def rest(self, way: Relay, seconds: float) -> None:
        way.heartbeats()
        time.sleep(seconds)
        for times in way.heartbeats().values():
            self.idle += lateness(times)

    def note(self, times: Iterable[Sequence[float]], busy: Sequence[Span]) -> None:
        """Of the times by server those count between which bytes moved."""
        for each in times:
            self.busy += lateness(each, busy)

    def report(self) -> dict[str, Any]:
        return {
            "interval_ms": round(HEARTBEAT_S * 1e3),
            "idle": {"count": len(self.idle), **summary(self.idle)},
            "during_transfers": {"count": len(self.busy), **summary(self.busy)},
            "idle_samples_ms": milliseconds(self.idle),
            "during_samples_ms": milliseconds(self.busy),
        }


def lateness(times: Sequence[float], spans: Sequence[Span] | None = None) -> list[float]:
    """Of each pair that meets one of the spans. None: of all."""
    return [
        max(0.0, after - before - HEARTBEAT_S)
        for before, after in pairwise(times)
        if spans is None or any(before < end and after > begin for begin, end in spans)
    ]


def milliseconds(seconds: Iterable[float]) -> list[float]:
    return [round(each * 1e3, 3) for each in sorted(seconds)]
