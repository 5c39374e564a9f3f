"""The invariants between leases, sessions and the store, checked the slow way: for tests only."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvwire.server.leases import LookupLease, ReadLease, WriteLease
from kvwire.server.store.integrity import ensure
from kvwire.server.store.objects import ObjectState

if TYPE_CHECKING:
    from kvwire.server.state import EngineState
    from kvwire.server.store import Chunk


def check_engine(state: EngineState) -> None:
    """Raise AssertionError, naming the first thing that does not hold."""
    state.store.check_integrity()
    _check_pins(state)
    _check_writes(state)
    _check_quarantine(state)
    for lease in state.leases:
        owner = state.registrations.get(lease.owner.id) or state.borrowers.get(lease.owner.id)
        ensure(owner is lease.owner, "a lease has outlived its owner")
        if isinstance(lease, LookupLease):
            ensure(lease.session.lease is lease, "a lookup lease is not its session's")
            ensure(state.sessions.is_current(lease.session), "a lookup lease has outlived its session")
            ensure(0 < lease.held == sum(c is not None for c in lease.chunks), "held chunks drifted")
    kinds = Counter(lease.kind for lease in state.leases)
    ensure(all(kinds[kind] == count for kind, count in state.leases.counts.items()), "lease counts drifted")
    ensure(len(list(state.sessions)) == len(state.sessions), "session count drifted")
    counters = state.counters
    ensure(
        counters.asked_tokens == counters.hit_tokens + counters.miss_tokens, "hit accounting does not add up"
    )
    brought = counters.l2_hit_tokens + counters.peer_hit_tokens
    ensure(brought <= counters.hit_tokens, "more was brought than found")


def _check_pins(state: EngineState) -> None:
    pins: Counter[Chunk] = Counter(state.endings.waiting_chunks)
    pins.update(state.fills.held)
    pins.update(stored.chunk for stored in state.fills.reserved)
    for lease in state.leases:
        if isinstance(lease, WriteLease):
            pins.update(stored.chunk for stored in lease.objects)
        else:
            pins.update(chunk for chunk in lease.chunks if chunk is not None)
    for chunk in state.store.chunks():
        ensure(chunk.pins == pins.pop(chunk, 0), "pins are not those of the leases")
    ensure(not pins, "a lease pins a chunk that is not in the index")


def _check_writes(state: EngineState) -> None:
    written = [stored for lease in state.leases if isinstance(lease, WriteLease) for stored in lease.objects]
    written += state.fills.reserved
    ensure(len(written) == len(set(written)), "two writers share an object")
    for stored in written:
        ensure(stored.state is ObjectState.RESERVED, "a writer holds what is not reserved")
        ensure(stored.chunk.shards[stored.shard] is stored, "a reserved object is not in the index")
    reserved = sum(stored.extent for stored in written)
    ensure(state.store.reserved_bytes == reserved, "reserved bytes are not those of the writers")
    for lease in state.leases:
        if isinstance(lease, ReadLease):
            states = {stored.state for stored in lease.objects}
            ensure(states <= {ObjectState.RESIDENT, ObjectState.DROPPED}, "a read lease holds freed memory")


def _check_quarantine(state: EngineState) -> None:
    waiting = [*state.endings.waiting_objects, *state.fills.quarantined]
    ensure(
        all(stored.state is ObjectState.QUARANTINED for stored in waiting), "what waits is not quarantined"
    )
    quarantined = sum(stored.extent for stored in waiting)
    ensure(state.store.quarantined_bytes == quarantined, "quarantined bytes drifted")
    taken = [(stored.offset, stored.extent) for stored in waiting]
    for chunk in state.store.chunks():
        taken += [(s.offset, s.extent) for s in [*chunk.shards, *chunk.dropped] if s is not None]
    taken.sort()
    ends = [start + extent for start, extent in taken]
    starts = [start for start, _ in taken[1:]]
    ensure(all(end <= start for end, start in zip(ends, starts, strict=False)), "two objects overlap")
