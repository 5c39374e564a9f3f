from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, ClassVar, Final, TypeAlias, TypeVar

from kvwire.errors import Internal, KvwireError, LeaseLost, LeaseUnknown
from kvwire.server.messages import LeaseKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.server.registry import Registration
    from kvwire.server.sessions import Session
    from kvwire.server.store import Chunk, StoredObject

MAX_LEASE_ID: Final = 2**32 - 1
"""A lease id is part of the tags of UCX messages, which have 32 bits for it."""


@dataclass(slots=True, eq=False)
class LookupLease:
    """Pins on what a boundary leans on: `chunks[i]` is chunk `first` + i of the prompt; None: released."""

    kind: ClassVar[LeaseKind] = LeaseKind.LOOKUP
    id: int
    owner: Registration
    deadline: float
    session: Session
    first: int
    chunks: list[Chunk | None]
    held: int


@dataclass(slots=True, eq=False)
class ReadLease:
    """Pins on `chunks`, for reading `objects`."""

    kind: ClassVar[LeaseKind] = LeaseKind.READ
    id: int
    owner: Registration
    deadline: float
    objects: list[StoredObject]
    chunks: list[Chunk]


@dataclass(slots=True, eq=False)
class WriteLease:
    """Reserved objects: `objects[i]` is of chunk `positions[i]` of the prompt `tokens` (packed, if known)."""

    kind: ClassVar[LeaseKind] = LeaseKind.WRITE
    id: int
    owner: Registration
    deadline: float
    objects: list[StoredObject]
    positions: list[int] = field(default_factory=list)
    tokens: bytes = b""


Lease: TypeAlias = LookupLease | ReadLease | WriteLease
L = TypeVar("L", LookupLease, ReadLease, WriteLease)


class LeaseTable:
    """Live leases by id. Ids count up from `first`, and round, and are never used twice in an incarnation."""

    def __init__(self, first: int = 1) -> None:
        self._live: dict[int, Lease] = {}
        self._by_owner: dict[int, dict[int, Lease]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._first = first
        self._given = 0
        self.counts = dict.fromkeys(LeaseKind, 0)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._live.values())

    @property
    def next_id(self) -> int:
        """The id that the next lease must have. Raises Internal when none is left."""
        if self._given >= MAX_LEASE_ID:
            raise Internal("The server has used up its lease ids: restart it.")
        return (self._first - 1 + self._given) % MAX_LEASE_ID + 1

    def take_id(self) -> int:
        """An id for something that is written to and under no lease. Raises Internal when none is left."""
        taken = self.next_id
        self._given += 1
        return taken

    def add(self, lease: Lease) -> None:
        if lease.id != self.next_id:
            raise RuntimeError(f"lease {lease.id} is out of turn")
        self._given += 1
        self._live[lease.id] = lease
        self._by_owner.setdefault(lease.owner.id, {})[lease.id] = lease
        self.counts[lease.kind] += 1
        heappush(self._deadlines, (lease.deadline, lease.id))

    def get(self, lease_id: int, kind: type[L], owner: Registration) -> L | None:
        """The live lease, if it is of this kind and belongs to this registration."""
        lease = self._live.get(lease_id)
        return lease if isinstance(lease, kind) and lease.owner is owner else None

    def missing(self, lease_id: int) -> KvwireError:
        """Why a client does not have this lease."""
        was_given = 0 < lease_id <= MAX_LEASE_ID and (lease_id - self._first) % MAX_LEASE_ID < self._given
        if was_given and lease_id not in self._live:
            return LeaseLost(f"Lease {lease_id} has ended before.", lease_id=lease_id)
        return LeaseUnknown(f"Lease {lease_id} is not one of this client's.", lease_id=lease_id)

    def remove(self, lease: Lease) -> None:
        """End a live lease."""
        del self._live[lease.id]
        owned = self._by_owner[lease.owner.id]
        del owned[lease.id]
        if not owned:
            del self._by_owner[lease.owner.id]
        self.counts[lease.kind] -= 1

    def due(self, now: float) -> list[Lease]:
        """Live leases whose deadline has come, by deadline."""
        due: list[Lease] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heappop(self._deadlines)
            lease = self._live.get(lease_id)
            if lease is not None:
                due.append(lease)
        return due

    def of_owner(self, registration_id: int) -> list[Lease]:
        return list(self._by_owner.get(registration_id, {}).values())
