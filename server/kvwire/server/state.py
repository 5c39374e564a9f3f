from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvwire.errors import ChunkSizeNotNegotiated

if TYPE_CHECKING:
    from kvwire.server.endings import LeaseEndings
    from kvwire.server.fetch.fills import Fills
    from kvwire.server.leases import LeaseTable
    from kvwire.server.registry import Registration, Registrations
    from kvwire.server.sessions import Sessions
    from kvwire.server.spaces import Spaces
    from kvwire.server.status import EngineCounters
    from kvwire.server.store import L1Store


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Times in seconds. A lookup hashes `slice_chunks` chunks between two chances for others to run.

    `first_lease` is the id of the first lease. Messages of two servers, and of a server before and after a
    restart, meet in one client: they are told apart by lease ids, so each run begins elsewhere.
    """

    lookup_ttl: float = 60.0
    read_ttl: float = 30.0
    write_ttl: float = 30.0
    session_ttl: float = 600.0
    registration_ttl: float = 120.0
    max_sessions: int = 65536
    max_registrations: int = 1024
    slice_chunks: int = 128
    first_lease: int = 1


@dataclass(slots=True, eq=False)
class EngineState:
    """The parts that the flows of the engine share."""

    config: EngineConfig
    store: L1Store
    registrations: Registrations
    sessions: Sessions
    spaces: Spaces
    leases: LeaseTable
    endings: LeaseEndings
    counters: EngineCounters
    fills: Fills
    chunk_size: int = 0
    borrowers: dict[int, Registration] = field(default_factory=dict)
    """Other servers that hold leases, by a number of their own."""

    def require_chunk_size(self) -> int:
        """The bound size in tokens. Raises ChunkSizeNotNegotiated."""
        if not self.chunk_size:
            raise ChunkSizeNotNegotiated("The chunk size of this server is not negotiated yet.")
        return self.chunk_size
