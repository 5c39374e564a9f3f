from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.errors import KvwireError
from kvwire.server.leases import ReadLease
from kvwire.server.messages import EndReason, MissingObject, ReadSlot, RetrieveGrant
from kvwire.server.store import ObjectState
from kvwire.server.targets import plan_objects

if TYPE_CHECKING:
    from kvwire.server.messages import RetrieveItem
    from kvwire.server.registry import Registration
    from kvwire.server.state import EngineState
    from kvwire.server.store import Chunk, StoredObject
    from kvwire.server.targets import Targets


class Retrieves:
    """Holding objects while workers read them."""

    def __init__(self, state: EngineState, targets: Targets) -> None:
        self._state = state
        self._targets = targets

    def begin(self, registration: Registration, item: RetrieveItem, now: float) -> RetrieveGrant:
        """Pin what is resident of the objects that are meant, and name what is not."""
        try:
            chunks = self._targets.resolve(registration, item.target, now)
            plan = plan_objects(item.ranges, chunks)
        except KvwireError as error:
            self._state.counters.fail(error.reason)
            return RetrieveGrant(0, 0.0, (), (), error)
        present, _ = self._state.store.refresh_chain(chunks.space, chunks.before, chunks.keys)
        slots: list[ReadSlot] = []
        missing: list[MissingObject] = []
        objects: list[StoredObject] = []
        held: list[Chunk] = []
        for position, groups in plan:
            chunk = present[position - chunks.first]
            before = len(objects)
            for group in groups:
                stored = _resident(chunk, registration.client.kv_rank, group)
                if stored is None:
                    missing.append(MissingObject(position, group))
                else:
                    objects.append(stored)
                    slots.append(ReadSlot(position, group, stored.offset, stored.size, stored.checksum))
            if chunk is not None and len(objects) > before:
                held.append(chunk)
        if missing:
            self._state.counters.fail("OBJECT_NOT_FOUND", len(missing))
        if not objects:
            return RetrieveGrant(0, 0.0, (), tuple(missing))
        ttl = self._state.config.read_ttl
        lease = ReadLease(self._state.leases.next_id, registration, now + ttl, objects, held)
        self._state.store.pin(held)
        self._state.leases.add(lease)
        return RetrieveGrant(lease.id, ttl, tuple(slots), tuple(missing))

    def end(self, registration: Registration, lease_id: int) -> bool:
        """End a read lease. False unless it, and all its objects, were held until now.

        What was read under a lease that was not held must not be used.
        """
        lease = self._state.leases.get(lease_id, ReadLease, registration)
        counters = self._state.counters
        if lease is None:
            counters.surplus_releases += 1
            counters.fail(self._state.leases.missing(lease_id).reason)
            return False
        intact = all(stored.state is ObjectState.RESIDENT for stored in lease.objects)
        self._state.endings.end(lease, EndReason.FINISHED)
        if not intact:
            return False
        path = registration.data_path
        size = sum(stored.size for stored in lease.objects)
        counters.retrieved_objects += len(lease.objects)
        counters.retrieved_bytes[path] = counters.retrieved_bytes.get(path, 0) + size
        return True


def _resident(chunk: Chunk | None, rank: int, group: int) -> StoredObject | None:
    if chunk is None:
        return None
    stored = chunk.shards[chunk.space.shards.shard(rank, group)]
    return stored if stored is not None and stored.state is ObjectState.RESIDENT else None
