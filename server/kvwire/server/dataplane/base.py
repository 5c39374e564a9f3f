"""What the server does for each data path: admit clients, open leases, take bytes, let go of memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvwire.errors import KvwireError


@dataclass(frozen=True, slots=True)
class PathOffer:
    """A path that a client can use. `address` is its UCX worker address, empty on other paths."""

    path: str
    host_id: str
    address: bytes


@dataclass(frozen=True, slots=True)
class ShmGrant:
    """What a client needs to map the arena; `liveness_name` is a lock file that it holds."""

    arena_name: str
    nonce: bytes
    arena_bytes: int
    liveness_name: str


@dataclass(frozen=True, slots=True)
class UcxGrant:
    """The server's worker address, and the probe that it has begun."""

    address: bytes
    probe_tag: int
    probe_bytes: int


@dataclass(frozen=True, slots=True)
class Admission:
    """The chosen path, why no better one, and how to use it. `token` names it until `bind` or `withdraw`."""

    path: str
    reason: str
    grant: ShmGrant | UcxGrant | None
    token: object = None


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """One slot of a lease: where its bytes lie in the arena."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Opened:
    """`piece_bytes` is 0 where slots do not move in pieces; `first_tags` is empty where there are no tags.

    `arrival_word` is where the client can say that all has arrived, 0 where it has to call.
    """

    piece_bytes: int = 0
    first_tags: tuple[int, ...] = ()
    arrival_word: int = 0


@dataclass(frozen=True, slots=True)
class Received:
    """Slots of a write lease whose bytes did not arrive, with the cause."""

    failed: Mapping[int, KvwireError] = field(default_factory=dict)


class ServerPath(Protocol):
    """One data path. All methods run on the event loop."""

    async def admit(self, offer: PathOffer) -> Admission | str:
        """An admission, or why this path cannot be used."""

    def bind(self, registration_id: int, admission: Admission) -> None:
        """The admitted client has been registered."""

    def withdraw(self, admission: Admission) -> None:
        """The admitted client was not registered after all."""

    def leave(self, registration_id: int) -> None:
        """The registration has ended; its process may still live."""

    def open_store(self, registration_id: int, lease_id: int, slots: Sequence[SlotMemory]) -> Opened:
        """Get ready to take the bytes of a write lease."""

    def open_retrieve(self, registration_id: int, lease_id: int, slots: Sequence[SlotMemory]) -> Opened:
        """Begin to give the bytes of a read lease."""

    async def received(self, lease_id: int, slots: Sequence[int], seconds: float) -> Received:
        """Wait for the bytes of these slots."""

    async def cancel(self, lease_id: int) -> None:
        """Stop what moves the bytes of an ended lease; returns when nothing touches its memory any more."""

    async def close(self) -> None:
        """Stop everything."""
