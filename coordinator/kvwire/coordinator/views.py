"""What the fleet is asked with and answers; see `fleet.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvwire.coordinator.apply import Applied
from kvwire.coordinator.messages import NO_USAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.coordinator.apply import Event
    from kvwire.coordinator.messages import Admission, Reporting, ServerInfo, Usage


class Batch(Protocol):
    """A `kvwire.v1.CacheEventBatch` or alike."""

    @property
    def server_id(self) -> str: ...
    @property
    def incarnation(self) -> bytes: ...
    @property
    def sequence(self) -> int: ...
    @property
    def lost(self) -> int: ...
    @property
    def events(self) -> Sequence[Event]: ...


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Times in seconds. `keep_l2`: how long what a lost server has in L2 is listed. `blend_bytes` 0: off.

    `max_kept_events` are applied again at once when a snapshot's position is known: more would delay others.
    """

    expires_after: float = 30.0
    silent_after: float = 3.0
    retry_after: float = 2.0
    repeat_silent: float = 15.0
    keep_l2: float = 86_400.0
    max_keys: int = 65_536
    max_kept_events: int = 100_000
    max_deleted_while_loading: int = 200_000
    blend_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Registered:
    next_sequence: int
    sharing_problem: str


@dataclass(frozen=True, slots=True)
class Reported:
    """`sequence`: the highest one that the sender may forget; 0 for a batch of an earlier run."""

    sequence: int
    admission: Admission
    applied: Applied = field(default_factory=Applied)


@dataclass(frozen=True, slots=True)
class MemberView:
    info: ServerInfo
    heartbeat_age: float
    used_bytes: int
    reporting: Reporting
    applied_sequence: int
    placements: int
    sharing_problem: str
    closed_sequence: int = 0
    usage: Usage = NO_USAGE


@dataclass(frozen=True, slots=True)
class Pull:
    """A snapshot to be fetched from one of `addresses`. `number` tells it from the server's other pulls."""

    server_id: str
    incarnation: bytes
    addresses: tuple[str, ...]
    number: int
