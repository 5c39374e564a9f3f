"""Methods of the contract that this program does not serve (yet): they say so, with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from kvwire.errors import NotImplementedYet
from kvwire.v1 import peer_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


def not_served(method: str) -> Callable[[Any, Any, Any], Awaitable[Any]]:
    async def answer(_self: Any, _request: Any, _context: Any) -> NoReturn:
        raise _error(method)

    return answer


def stream_not_served(method: str) -> Callable[[Any, Any, Any], AsyncIterator[Any]]:
    async def answer(_self: Any, _request: Any, _context: Any) -> AsyncIterator[Any]:
        if method:
            raise _error(method)
        yield

    return answer


class PeerService(peer_service_pb2_grpc.PeerServiceServicer):
    """Comes with peers."""

    LookupAndLease: Any = not_served("LookupAndLease")
    ReleaseLease: Any = not_served("ReleaseLease")
    SnapshotPlacements: Any = stream_not_served("SnapshotPlacements")


def _error(method: str) -> NotImplementedYet:
    return NotImplementedYet(f"This server does not serve {method}.", method=method)
