"""What /metrics exports of lower tiers, by their names: parts of `kvwire.server.metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvwire.serving.metrics import Metric, counter, gauge

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.server.tiers.counters import TierStatus

    Read = Callable[[TierStatus], float]


def _by_tier(read: Read) -> Callable[[Any], dict[str, float]]:
    return lambda state: {tier.name: read(tier) for tier in state.tiers}


def _gauge(name: str, text: str, read: Read) -> Metric[Any]:
    return gauge(f"kvwire_tier_{name}", text, _by_tier(read), "tier")


def _counter(name: str, text: str, read: Read) -> Metric[Any]:
    return counter(f"kvwire_tier_{name}_total", text, _by_tier(read), "tier")


TIER_METRICS: Final[tuple[Metric[Any], ...]] = (
    _gauge("capacity_bytes", "The most that a lower tier may hold.", lambda t: t.capacity_bytes),
    _gauge("used_bytes", "What it holds, writes or deletes, as stored.", lambda t: t.used_bytes),
    _gauge("chunks", "Its chunks with at least one object.", lambda t: t.chunks),
    _gauge("objects", "Its objects.", lambda t: t.objects),
    _gauge("queued_objects", "Objects that wait to be written to it.", lambda t: t.queued_objects),
    _gauge("problem", "1 while something does not work there.", lambda t: float(bool(t.problem))),
    _counter("written_objects", "Objects written.", lambda t: t.counters.written_objects),
    _counter("written_bytes", "Bytes written, as stored.", lambda t: t.counters.written_bytes),
    _counter("read_objects", "Objects read and found intact.", lambda t: t.counters.read_objects),
    _counter("read_bytes", "Bytes read, as stored.", lambda t: t.counters.read_bytes),
    _counter("failed_writes", "Objects that could not be written.", lambda t: t.counters.failed_writes),
    _counter(
        "failed_reads", "Objects that could not be read, damaged ones too.", lambda t: t.counters.failed_reads
    ),
    _counter(
        "damaged_objects",
        "Objects that were found damaged or gone, and dropped.",
        lambda t: t.counters.damaged_objects,
    ),
    _counter(
        "skipped_objects",
        "Objects not written: too many waited, no room, or gone before their turn.",
        lambda t: t.counters.skipped_objects,
    ),
    _counter("evicted_chunks", "Chunks dropped there to make room.", lambda t: t.evicted_chunks),
)
