"""Leases for other servers: what a peer lacks of a prompt, and this server has in memory."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvwire.errors import FleetMixed, Overloaded
from kvwire.keys import Namespace
from kvwire.server.layout import KvGroup, KvLayout, ShardMap, layout_digest
from kvwire.server.leases import ReadLease
from kvwire.server.messages import ClientInfo, EndReason
from kvwire.server.registry import Registration
from kvwire.server.store import ObjectState, longest_boundary, needed_shards

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.server.lifecycle import Lifecycle
    from kvwire.server.state import EngineState
    from kvwire.server.store import Chunk, ObjectRef, Space, StoredObject

MAX_LOANS: Final = 256
"""Live leases of peers."""
NO_NAMESPACE: Final = Namespace("peer")
NO_SHARDS: Final = ShardMap(KvLayout(1, (KvGroup("full", 1, 0, 1, 1, 1),)), 1)
"""A peer is registered for no model."""


@dataclass(frozen=True, slots=True)
class LoanRequest:
    """A prompt by its keys. `have[i]` has the bits of the shards of chunk i that the borrower needs not."""

    root: bytes
    layout_digest: bytes
    keys: Sequence[bytes]
    have: Sequence[int]
    max_objects: int


@dataclass(frozen=True, slots=True)
class LoanSlot:
    chunk_index: int
    rank: int
    group_index: int
    ref: ObjectRef


@dataclass(frozen=True, slots=True)
class Loan:
    """`lease_id` is 0 when nothing is leased: what is here does not help the borrower."""

    hit_chunks: int
    lease_id: int = 0
    ttl: float = 0.0
    slots: tuple[LoanSlot, ...] = ()


@dataclass(frozen=True, slots=True)
class _Plan:
    """`lacking` has, by chunk, the shards that the boundary needs, the borrower lacks and this server has."""

    boundary: int
    lacking: Sequence[int]
    chunks: Sequence[Chunk | None]

    @property
    def helps(self) -> bool:
        return any(self.lacking)


class Lending:
    """A borrower stands for a peer that can be reached over one data path. Bytes are moved by this server."""

    def __init__(self, state: EngineState, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self.given_leases = 0
        self.given_bytes = 0

    def borrower(self, name: str, data_path: str) -> Registration:
        """A new one, by the `server_id` of the peer."""
        state = self._state
        client = ClientInfo(secrets.token_bytes(16), f"server {name}", name, "standalone")
        number = secrets.randbits(63) | 1
        borrower = Registration(number, client, NO_NAMESPACE, b"", NO_SHARDS, data_path, last_seen=0.0)
        state.borrowers[number] = borrower
        return borrower

    def look(self, request: LoanRequest, now: float) -> tuple[int, bool]:
        """The boundary that `lend` would reach, and whether it would lease anything. Raises FleetMixed."""
        self._lifecycle.advance(now)
        space = self._space(request)
        if space is None:
            return 0, False
        plan = self._plan(space, request)
        return plan.boundary, plan.helps

    def lend(self, borrower: Registration, request: LoanRequest, now: float) -> Loan:
        """Lease what is needed for the longest boundary that both servers reach together.

        Raises FleetMixed, Overloaded.
        """
        self._lifecycle.advance(now)
        state = self._state
        space = self._space(request)
        if space is None:
            return Loan(0)
        plan = self._plan(space, request)
        if not plan.helps:
            return Loan(plan.boundary)
        live = len(self.leases())
        if live >= MAX_LOANS:
            raise Overloaded(
                f"{live} leases of peers are live, the limit.", in_flight=live, allowed=MAX_LOANS
            )
        slots, objects, held = self._pick(space, plan)
        lease = ReadLease(state.leases.next_id, borrower, now + state.config.read_ttl, objects, held)
        state.store.pin(held)
        state.leases.add(lease)
        self._used(space, request, held)
        self.given_leases += 1
        return Loan(plan.boundary, lease.id, state.config.read_ttl, tuple(slots))

    def checksums(self, borrower: Registration, lease_id: int, now: float) -> tuple[bytes, ...] | None:
        """Of the objects of a loan as they are now. None when it does not hold any more."""
        self._lifecycle.advance(now)
        lease = self._state.leases.get(lease_id, ReadLease, borrower)
        if lease is None or not _intact(lease):
            return None
        return tuple(stored.checksum for stored in lease.objects)

    def end(self, name: str, lease_id: int, now: float) -> bool:
        """The peer of this name ends a lease. Whether it, and all its objects, were held until now."""
        self._lifecycle.advance(now)
        for borrower in self._state.borrowers.values():
            lease = self._state.leases.get(lease_id, ReadLease, borrower)
            if lease is not None and borrower.client.name == name:
                held = _intact(lease)
                self._state.endings.end(lease, EndReason.FINISHED)
                if held:
                    self.given_bytes += sum(stored.size for stored in lease.objects)
                return held
        self._state.counters.surplus_releases += 1
        return False

    def give_up(self, borrower: Registration, lease_id: int) -> None:
        """End a lease that was given for nothing."""
        lease = self._state.leases.get(lease_id, ReadLease, borrower)
        if lease is not None:
            self._state.endings.end(lease, EndReason.ABORTED)

    def forget(self, borrower: Registration, reason: EndReason = EndReason.DISCONNECTED) -> None:
        """It is not reached any more, or gone: its leases end."""
        for lease in self._state.leases.of_owner(borrower.id):
            self._state.endings.end(lease, reason)
        self._state.borrowers.pop(borrower.id, None)

    def forget_all(self, reason: EndReason) -> None:
        for borrower in list(self._state.borrowers.values()):
            self.forget(borrower, reason)

    def leases(self) -> list[int]:
        """Live ones."""
        of_owner = self._state.leases.of_owner
        return [lease.id for borrower in self._state.borrowers for lease in of_owner(borrower)]

    def is_live(self, lease_id: int, now: float) -> bool:
        self._lifecycle.advance(now)
        return lease_id in self.leases()

    def is_waiting(self, lease_id: int) -> bool:
        """Whether a lease has ended and its bytes may still be on their way."""
        return self._state.endings.waits_for(lease_id)

    def _space(self, request: LoanRequest) -> Space | None:
        """None: nothing is here of this namespace. Raises FleetMixed for one with another layout."""
        space = self._state.spaces.by_root(request.root)
        if space is None:
            return None
        own = layout_digest(space.shards.layout, space.shards.chunk_size)
        if own != request.layout_digest:
            raise FleetMixed(
                "The two servers have different KV layouts for this model: its engines must have the same"
                " block size, data type and parallelism, or namespaces of their own.",
                differs="layout",
                chunk_size=space.shards.chunk_size,
                fleet_chunk_size=space.shards.chunk_size,
                digest=request.layout_digest.hex(),
                fleet_digest=own.hex(),
            )
        return space

    def _plan(self, space: Space, request: LoanRequest) -> _Plan:
        keys, have, shards = request.keys, request.have, space.shards
        chunks = [self._state.store.get(key, space) for key in keys]
        own = [chunk.mask if chunk is not None else 0 for chunk in chunks]
        together = [mine | theirs for mine, theirs in zip(own, have, strict=True)]
        limit = len(keys)
        while True:
            boundary = longest_boundary(shards, together[:limit])
            needs = needed_shards(shards, boundary)
            lacking = [need & mine & ~theirs for need, mine, theirs in zip(needs, own, have, strict=False)]
            limit = _within(lacking, request.max_objects)
            if limit == boundary:
                return _Plan(boundary, lacking, chunks)

    def _pick(self, space: Space, plan: _Plan) -> tuple[list[LoanSlot], list[StoredObject], list[Chunk]]:
        slots: list[LoanSlot] = []
        objects: list[StoredObject] = []
        held: list[Chunk] = []
        for index, mask in enumerate(plan.lacking):
            chunk = plan.chunks[index]
            if not mask or chunk is None:
                continue
            held.append(chunk)
            for shard in range(space.shards.num_shards):
                stored = chunk.shards[shard] if mask >> shard & 1 else None
                if stored is not None:
                    rank, group = divmod(shard, space.shards.num_groups)
                    objects.append(stored)
                    slots.append(LoanSlot(index, rank, group, self._state.store.ref(stored)))
        return slots, objects, held

    def _used(self, space: Space, request: LoanRequest, held: list[Chunk]) -> None:
        store = self._state.store
        store.refresh_chain(space, (), request.keys)
        store.policy.hit(held)
        if store.listener is not None:
            store.listener.on_used(held)


def _within(lacking: Sequence[int], most: int) -> int:
    """How many chunks from the head on have at most so many objects together."""
    for index, mask in enumerate(lacking):
        most -= mask.bit_count()
        if most < 0:
            return index
    return len(lacking)


def _intact(lease: ReadLease) -> bool:
    return all(stored.state is ObjectState.RESIDENT for stored in lease.objects)
