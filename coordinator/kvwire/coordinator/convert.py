"""Messages of the contract to the domain's values and back. Checks what the schema cannot say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvwire.coordinator.messages import Admission, Reporting, ServerInfo, TierUsage, Usage
from kvwire.errors import InvalidArgument
from kvwire.serving import requests
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import namespace_pb2, placement_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvwire.coordinator.fleet import MemberView
    from kvwire.coordinator.messages import HoldingStats, Placement

MAX_ID_BYTES: Final = 128
MAX_ADDRESSES: Final = 16
MAX_FEATURES: Final = 64
MAX_TIERS: Final = 64
MAX_TEXT_BYTES: Final = 256
"""Of an address, a version, a feature."""
MAX_BACKEND_BYTES: Final = 64
MAX_CHUNK_TOKENS: Final = 1 << 30

DIGESTS: Final[dict[namespace_pb2.DigestFunction.ValueType, str]] = {
    namespace_pb2.DIGEST_FUNCTION_SHA256: "sha256",
}
DIGEST_NUMBERS: Final = {name: number for number, name in DIGESTS.items()}
REPORTING: Final[dict[Reporting, pb.ReportingState.ValueType]] = {
    Reporting.CURRENT: pb.REPORTING_STATE_CURRENT,
    Reporting.LAGGING: pb.REPORTING_STATE_LAGGING,
    Reporting.RESYNCING: pb.REPORTING_STATE_RESYNCING,
    Reporting.SILENT: pb.REPORTING_STATE_SILENT,
}
ADMISSIONS: Final[dict[Admission, pb.EventAdmission.ValueType]] = {
    Admission.ADMITTED: pb.EVENT_ADMISSION_ADMITTED,
    Admission.DUPLICATE: pb.EVENT_ADMISSION_DUPLICATE,
    Admission.STALE: pb.EVENT_ADMISSION_STALE_INCARNATION,
    Admission.GAP: pb.EVENT_ADMISSION_GAP,
}


namespace = requests.namespace
check_count = requests.check_count
duration = requests.duration


def server_info(message: pb.ServerInfo) -> ServerInfo:
    """Raises InvalidArgument, TooManyItems. Id and incarnation are checked by the members themselves."""
    check_count("server.addresses", len(message.addresses), MAX_ADDRESSES)
    check_count("server.features", len(message.features), MAX_FEATURES)
    _check_texts("server.addresses", message.addresses)
    _check_texts("server.features", message.features)
    _check_texts("server.version", (message.version,))
    if message.chunk_size > MAX_CHUNK_TOKENS:
        raise InvalidArgument("server.chunk_size", f"{message.chunk_size} is above {MAX_CHUNK_TOKENS}")
    return ServerInfo(
        server_id=message.server_id,
        incarnation=message.incarnation,
        addresses=tuple(message.addresses),
        chunk_size=message.chunk_size,
        digest=DIGESTS.get(message.digest_function, ""),
        capacity_bytes=message.capacity_bytes,
        version=message.version,
        features=tuple(message.features),
    )


def usage(request: pb.HeartbeatRequest) -> Usage:
    """Raises InvalidArgument, TooManyItems."""
    check_count("tiers", len(request.tiers), MAX_TIERS)
    _check_texts("tiers", [each.backend for each in request.tiers], MAX_BACKEND_BYTES)
    tiers = (
        TierUsage(each.tier, each.backend, each.used_bytes, each.capacity_bytes) for each in request.tiers
    )
    return Usage(request.asked_tokens, request.hit_tokens, tuple(tiers))


def member(view: MemberView, lag: float | None) -> pb.Member:
    return pb.Member(
        server=_server_info(view.info),
        heartbeat_age=duration(view.heartbeat_age),
        used_bytes=view.used_bytes,
        reporting=REPORTING[view.reporting],
        applied_sequence=view.applied_sequence,
        placements=view.placements,
        sharing=not view.sharing_problem,
        sharing_problem=view.sharing_problem,
        event_lag=None if lag is None else duration(lag),
        asked_tokens=view.usage.asked_tokens,
        hit_tokens=view.usage.hit_tokens,
        tiers=[_tier(each) for each in view.usage.tiers],
        closed_sequence=view.closed_sequence,
    )


def chunk(key: bytes, found: Iterable[Placement], now: float) -> pb.ChunkPlacements:
    return pb.ChunkPlacements(chunk_key=key, placements=placements(found, now))


def placements(found: Iterable[Placement], now: float) -> list[placement_pb2.Placement]:
    return [
        placement_pb2.Placement(
            server_id=each.server_id,
            incarnation=each.incarnation,
            tier=each.tier,  # type: ignore[arg-type]
            backend=each.backend,
            size_bytes=each.size_bytes,
            age=duration(now - each.since),
        )
        for each in found
    ]


def holding_fields(each: HoldingStats) -> dict[str, Any]:
    return {
        "server_id": each.server_id,
        "tier": each.tier,
        "backend": each.backend,
        "placements": each.placements,
        "placement_bytes": each.placement_bytes,
    }


def check_server_id(field: str, value: str, *, empty: bool = False) -> None:
    """Raises InvalidArgument."""
    if not (0 if empty else 1) <= len(value.encode()) <= MAX_ID_BYTES:
        raise InvalidArgument(field, f"has more than {MAX_ID_BYTES} bytes, or none")


def _server_info(info: ServerInfo) -> pb.ServerInfo:
    return pb.ServerInfo(
        server_id=info.server_id,
        incarnation=info.incarnation,
        addresses=info.addresses,
        chunk_size=info.chunk_size,
        digest_function=DIGEST_NUMBERS.get(info.digest, namespace_pb2.DIGEST_FUNCTION_UNSPECIFIED),
        capacity_bytes=info.capacity_bytes,
        version=info.version,
        features=info.features,
    )


def _tier(each: TierUsage) -> pb.TierUsage:
    return pb.TierUsage(
        tier=each.tier,  # type: ignore[arg-type]
        backend=each.backend,
        used_bytes=each.used_bytes,
        capacity_bytes=each.capacity_bytes,
    )


def _check_texts(field: str, texts: Iterable[str], allowed: int = MAX_TEXT_BYTES) -> None:
    for text in texts:
        if len(text.encode()) > allowed:
            raise InvalidArgument(field, f"has more than {allowed} bytes")
