"""How leases end, and what becomes of memory that somebody may still touch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvwire.server.leases import LookupLease, ReadLease, WriteLease
from kvwire.server.messages import EndedLease, EndReason, LeaseKind, QuarantinedOwner

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.server.leases import Lease, LeaseTable
    from kvwire.server.registry import Registration
    from kvwire.server.status import EngineCounters
    from kvwire.server.store import Chunk, L1Store, StoredObject

# The owner says with these that it does not touch the slots any more.
_POLITE = frozenset({EndReason.ABORTED, EndReason.FINISHED, EndReason.UNREGISTERED})


@dataclass(slots=True, eq=False)
class _Remainder:
    """What an ended lease still keeps: quarantined objects, or pins on chunks that are being sent.

    Where this server moves the bytes, it waits for `confirm`, whatever the owner says. Else for the owner.
    """

    owner: Registration
    objects: list[StoredObject] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    acknowledged: bool = False


class LeaseEndings:
    """Every lease ends here, exactly once, and nothing is published by it.

    The remainders of one client process (`client_id`) answer to all its registrations, former and present.
    """

    def __init__(self, store: L1Store, leases: LeaseTable, counters: EngineCounters) -> None:
        self._store = store
        self._leases = leases
        self._counters = counters
        self._waiting: dict[int, _Remainder] = {}
        self._outbox: list[EndedLease] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting_objects(self) -> list[StoredObject]:
        return [stored for remainder in self._waiting.values() for stored in remainder.objects]

    @property
    def waiting_chunks(self) -> list[Chunk]:
        return [chunk for remainder in self._waiting.values() for chunk in remainder.chunks]

    def end(self, lease: Lease, reason: EndReason) -> None:
        """End a live lease of any kind. Reserved slots are given back or quarantined, never published."""
        self._leases.remove(lease)
        if reason is EndReason.EXPIRED:
            self._counters.expired_leases += 1
        if isinstance(lease, LookupLease):
            lease.session.lease = None
            self._store.unpin(chunk for chunk in lease.chunks if chunk is not None)
        elif isinstance(lease, ReadLease):
            self._end_read(lease, reason)
        else:
            self.give_back(lease, lease.objects, reason)

    def give_back(self, lease: WriteLease, objects: list[StoredObject], reason: EndReason) -> None:
        """Take reserved objects of a write lease out of the index; free what nobody can touch any more."""
        if not objects:
            return
        self._counters.aborted_slots += len(objects)
        polite = reason in _POLITE
        if polite and not lease.owner.server_moves_bytes:
            for stored in objects:
                self._store.abort(stored)
            return
        for stored in objects:
            self._store.quarantine(stored)
        self._wait(lease, _Remainder(lease.owner, objects=objects, acknowledged=polite), reason)

    def waits_for(self, lease_id: int) -> bool:
        """Whether something of an ended lease is not let go yet."""
        return lease_id in self._waiting

    def acknowledge(self, lease_id: int, registration: Registration) -> int:
        """The owner of an ended write lease will write no more. Returns the slots that this is news for."""
        remainder = self._waiting.get(lease_id)
        if remainder is None or remainder.acknowledged or not remainder.objects:
            return 0
        if remainder.owner.client.client_id != registration.client.client_id:
            return 0
        remainder.acknowledged = True
        slots = len(remainder.objects)
        if not remainder.owner.server_moves_bytes:
            self._settle(lease_id)
        return slots

    def acknowledge_former(self, lease_id: int, registration_id: int) -> int:
        """As `acknowledge`, by an owner whose registration has ended."""
        remainder = self._waiting.get(lease_id)
        if remainder is None or remainder.owner.id != registration_id:
            return 0
        return self.acknowledge(lease_id, remainder.owner)

    def confirm(self, lease_id: int) -> bool:
        """The data path is done with the lease. False when nothing waits for that."""
        remainder = self._waiting.get(lease_id)
        if remainder is None or not remainder.owner.server_moves_bytes:
            return False
        self._settle(lease_id)
        return True

    def owner_dead(self, registration_id: int) -> int:
        """The process behind a former registration is gone. Returns the number of leases let go."""
        return self._let_go(lambda owner: owner.id == registration_id)

    def client_left(self, client_id: bytes) -> int:
        """A client has said that it is done with all its slots. Returns the number of leases let go."""
        return self._let_go(lambda owner: owner.client.client_id == client_id)

    def client_of(self, registration_id: int) -> bytes | None:
        """The client of a former registration, while something of it waits."""
        for remainder in self._waiting.values():
            if remainder.owner.id == registration_id:
                return remainder.owner.client.client_id
        return None

    def owners(self) -> tuple[QuarantinedOwner, ...]:
        """Former owners that may still write to shared memory."""
        by_owner: dict[Registration, list[_Remainder]] = {}
        for remainder in self._waiting.values():
            if not remainder.owner.server_moves_bytes:
                by_owner.setdefault(remainder.owner, []).append(remainder)
        return tuple(
            QuarantinedOwner(
                registration_id=owner.id,
                client_id=owner.client.client_id,
                pid=owner.client.pid,
                leases=len(remainders),
                quarantined_bytes=sum(s.extent for remainder in remainders for s in remainder.objects),
            )
            for owner, remainders in by_owner.items()
        )

    def drain(self) -> tuple[EndedLease, ...]:
        """The leases that wait for `confirm` and have not been reported yet."""
        ended = tuple(self._outbox)
        self._outbox.clear()
        return ended

    def _end_read(self, lease: ReadLease, reason: EndReason) -> None:
        if lease.owner.server_moves_bytes:
            self._wait(lease, _Remainder(lease.owner, chunks=lease.chunks), reason)
        else:
            self._store.unpin(lease.chunks)

    def _wait(self, lease: ReadLease | WriteLease, remainder: _Remainder, reason: EndReason) -> None:
        self._waiting[lease.id] = remainder
        if lease.owner.server_moves_bytes:
            kind: LeaseKind = lease.kind
            self._outbox.append(EndedLease(lease.id, kind, lease.owner.id, lease.owner.data_path, reason))

    def _settle(self, lease_id: int) -> None:
        remainder = self._waiting.pop(lease_id)
        for stored in remainder.objects:
            self._store.release(stored)
        self._store.unpin(remainder.chunks)

    def _let_go(self, matches: Callable[[Registration], bool]) -> int:
        chosen = [
            lease_id
            for lease_id, remainder in self._waiting.items()
            if matches(remainder.owner) and not remainder.owner.server_moves_bytes
        ]
        for lease_id in chosen:
            self._settle(lease_id)
        return len(chosen)
