"""What /metrics exports of other servers: parts of `kvwire.server.metrics`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvwire.serving.metrics import Metric, counter, gauge

if TYPE_CHECKING:
    from collections.abc import Callable

    Read = Callable[["SharingFacts"], float]


@dataclass(frozen=True, slots=True)
class SharingFacts:
    """`sharing` and `apart` are other servers with which something can be shared, and nothing."""

    sharing: int = 0
    apart: int = 0
    fetched_chunks: int = 0
    fetched_bytes: int = 0
    failed_hints: int = 0
    failed_transfers: int = 0
    fallback_chunks: int = 0
    given_leases: int = 0
    given_bytes: int = 0
    questions: int = 0
    failed_questions: int = 0
    question_seconds: float = 0.0
    asked_chunks: int = 0
    located_chunks: int = 0


def _counter(name: str, text: str, read: Read) -> Metric[Any]:
    return counter(f"kvwire_{name}_total", text, lambda state: read(state.sharing))


PEER_METRICS: Final[tuple[Metric[Any], ...]] = (
    gauge(
        "kvwire_peers",
        "Other servers of the fleet, by whether anything can be shared with them.",
        lambda state: {"sharing": state.sharing.sharing, "apart": state.sharing.apart},
        "state",
    ),
    _counter("peer_fetched_chunks", "Chunks fetched and found intact.", lambda s: s.fetched_chunks),
    _counter("peer_fetched_bytes", "Bytes fetched and found intact.", lambda s: s.fetched_bytes),
    _counter(
        "peer_failed_hints", "Chunks that a server was thought to hold and did not.", lambda s: s.failed_hints
    ),
    _counter(
        "peer_failed_transfers", "Transfers that failed, in part or whole.", lambda s: s.failed_transfers
    ),
    _counter(
        "peer_fallback_chunks",
        "Chunks known elsewhere that could not be had, so that an engine computed them.",
        lambda s: s.fallback_chunks,
    ),
    _counter("peer_given_leases", "Leases given to other servers.", lambda s: s.given_leases),
    _counter("peer_given_bytes", "Bytes sent to them under leases that were held.", lambda s: s.given_bytes),
    _counter("directory_questions", "Questions to coordinators where chunks are.", lambda s: s.questions),
    _counter("directory_failures", "Those without an answer in time.", lambda s: s.failed_questions),
    _counter("directory_seconds", "How long all of them took.", lambda s: s.question_seconds),
    _counter("directory_asked_chunks", "Chunks that were asked for.", lambda s: s.asked_chunks),
    _counter("directory_located_chunks", "Those that were known elsewhere.", lambda s: s.located_chunks),
)
