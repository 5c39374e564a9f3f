from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple


class Tier(IntEnum):
    """Where a chunk lies; numbers as in `kvwire.v1.StorageTier`."""

    L1 = 1
    L2 = 2


class Reporting(StrEnum):
    """Whether a member's events arrive. Being alive is another fact."""

    CURRENT = "current"
    LAGGING = "lagging"
    RESYNCING = "resyncing"
    SILENT = "silent"


class Admission(StrEnum):
    ADMITTED = "admitted"
    DUPLICATE = "duplicate"
    STALE = "stale"
    GAP = "gap"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A cache server as it describes itself. `chunk_size` in tokens, 0 while it has none."""

    server_id: str
    incarnation: bytes
    addresses: tuple[str, ...] = ()
    chunk_size: int = 0
    digest: str = ""
    capacity_bytes: int = 0
    version: str = ""
    features: tuple[str, ...] = ()


class TierUsage(NamedTuple):
    """The fill of one store of a server. `capacity_bytes` 0: without a limit."""

    tier: int
    backend: str
    used_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What a member tells of itself with each heartbeat, for people to see."""

    asked_tokens: int = 0
    hit_tokens: int = 0
    tiers: tuple[TierUsage, ...] = ()


NO_USAGE: Final = Usage()


class Placement(NamedTuple):
    """A hint: the server said so. `since` is on the coordinator's monotonic clock, `uses` as reported."""

    server_id: str
    incarnation: bytes
    tier: int
    backend: str
    size_bytes: int
    since: float
    uses: int


@dataclass(frozen=True, slots=True)
class Located:
    """`prefixes`: leading chunks per server that can be asked, longest first; `combined`: by all of them.

    `placements` has one entry per key, also of servers that cannot be asked, or is empty: not asked for.
    """

    asked: int
    prefixes: tuple[tuple[str, int], ...]
    combined: int
    placements: tuple[tuple[Placement, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class DirectoryStats:
    """`keys` counts those whose last placement is fenced and not yet swept; `unswept` such placements."""

    keys: int
    placements: int
    placement_bytes: int
    unswept: int


@dataclass(frozen=True, slots=True)
class HoldingStats:
    server_id: str
    tier: int
    backend: str
    placements: int
    placement_bytes: int
