from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.errors import InvalidArgument, KvwireError, OutOfSpace, RangeInvalid
from kvwire.keys import TOKEN_BYTES
from kvwire.server.leases import WriteLease
from kvwire.server.messages import CommitResult, EndReason, SessionRange, SlotGrant, SlotState, StoreGrant
from kvwire.server.spaces import identify
from kvwire.server.store import ObjectState
from kvwire.server.targets import plan_objects

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.server.messages import CommitItem, StoreItem, Target
    from kvwire.server.registry import Registration
    from kvwire.server.state import EngineState
    from kvwire.server.store import L1Store, StoredObject
    from kvwire.server.targets import ChunkRange, Targets

CHECKSUM_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Opened:
    """An item with its objects, whose chain was refreshed: its last chunk has `tail_stamp`."""

    chunks: ChunkRange
    plan: list[tuple[int, Sequence[int]]]
    tail_stamp: int


class Stores:
    """Reserving, publishing and giving back what workers write."""

    def __init__(self, state: EngineState, targets: Targets) -> None:
        self._state = state
        self._targets = targets

    def demand(self, registration: Registration, items: Sequence[StoreItem]) -> dict[str, int]:
        """Bytes by tenant that `begin` would need if nothing of it were there."""
        rounded = self._state.store.allocator.rounded
        sizes = [rounded(size) for size in registration.shards.object_bytes]
        need: dict[str, int] = {}
        for item in items:
            target = item.target
            count = target.chunk_count if isinstance(target, SessionRange) else len(target.keys)
            size = 0 if item.ranges else count * sum(sizes)
            for part in item.ranges:
                size += part.chunk_count * (sizes[part.group_index] if part.group_index < len(sizes) else 0)
            tenant = self._tenant(registration, target)
            need[tenant] = need.get(tenant, 0) + size
        return need

    def _tenant(self, registration: Registration, target: Target) -> str:
        if not isinstance(target, SessionRange):
            try:
                return identify(target.namespace, self._state.chunk_size).tenant
            except InvalidArgument:
                return ""  # `begin` says what is wrong with it
        session = self._state.sessions.get(registration.client.engine_id, target.session_id)
        return session.space.tenant if session is not None else ""

    def begin(
        self, registration: Registration, items: Sequence[StoreItem], now: float
    ) -> tuple[StoreGrant, ...]:
        """Reserve slots, item by item. Chains of this call are never evicted to make room for one another."""
        protect = self._state.store.refresh(())
        opened = [self._open(registration, item, now) for item in items]
        return tuple(
            item if isinstance(item, StoreGrant) else self._grant(registration, item, protect, now)
            for item in opened
        )

    def commit(self, registration: Registration, item: CommitItem) -> CommitResult:
        """Publish the named slots of a live lease, give back its others. An ended lease publishes nothing."""
        lease = self._state.leases.get(item.lease_id, WriteLease, registration)
        if lease is None:
            return self._commit_late(registration, item)
        try:
            chosen = _named_slots(item, len(lease.objects))
        except KvwireError as error:
            self._state.counters.fail(error.reason)
            return CommitResult(0, 0, 0, error=error)
        self._state.leases.remove(lease)
        published = [self._publish(lease, index, checksum) for index, checksum in chosen.items()]
        rest = [stored for index, stored in enumerate(lease.objects) if index not in chosen]
        self._state.endings.give_back(lease, rest, EndReason.ABORTED)
        unchecked = tuple(self._state.store.ref(stored) for stored in published if not stored.checksum)
        return CommitResult(len(published), len(rest), 0, unchecked)

    def abort(self, registration: Registration, lease_id: int) -> int:
        """Give all slots of a lease back, or acknowledge that it has ended. Returns the number of slots."""
        lease = self._state.leases.get(lease_id, WriteLease, registration)
        if lease is not None:
            self._state.endings.end(lease, EndReason.ABORTED)
            return len(lease.objects)
        slots = self._state.endings.acknowledge(lease_id, registration)
        if not slots:
            self._state.counters.surplus_releases += 1
        return slots

    def _open(self, registration: Registration, item: StoreItem, now: float) -> StoreGrant | _Opened:
        try:
            chunks = self._targets.resolve(registration, item.target, now)
            plan = plan_objects(item.ranges, chunks)
            self._check_sizes(chunks, plan)
        except KvwireError as error:
            self._state.counters.fail(error.reason)
            return StoreGrant(0, 0.0, (), error)
        _, tail_stamp = self._state.store.refresh_chain(chunks.space, chunks.before, chunks.keys)
        return _Opened(chunks, plan, tail_stamp)

    def _check_sizes(self, chunks: ChunkRange, plan: list[tuple[int, Sequence[int]]]) -> None:
        sizes = chunks.space.shards.object_bytes
        for group in {group for _, groups in plan for group in groups}:
            if not self._state.store.fits(sizes[group]):
                capacity = self._state.store.allocator.capacity
                raise OutOfSpace(
                    f"An object of {sizes[group]} bytes cannot fit into the server's {capacity} bytes.",
                    needed=sizes[group],
                    capacity=capacity,
                )

    def _grant(self, registration: Registration, opened: _Opened, protect: int, now: float) -> StoreGrant:
        leases = self._state.leases
        rank = registration.client.kv_rank
        reserving = _Reserving(self._state.store, rank, opened, leases.next_id, protect)
        for position, groups in opened.plan:
            reserving.chunk(position, groups)
        slots = tuple(reserving.slots)
        failed = sum(slot.state is SlotState.NO_SPACE for slot in slots)
        if failed:
            self._state.counters.fail(OutOfSpace.reason, failed)
        if not reserving.objects:
            return StoreGrant(0, 0.0, slots)
        ttl = self._state.config.write_ttl
        lease = WriteLease(
            leases.next_id,
            registration,
            now + ttl,
            reserving.objects,
            [slot.chunk_index for slot in slots if slot.state is SlotState.RESERVED],
            opened.chunks.tokens if self._state.store.listener else b"",
        )
        leases.add(lease)
        return StoreGrant(lease.id, ttl, slots)

    def _publish(self, lease: WriteLease, index: int, checksum: bytes) -> StoredObject:
        stored = lease.objects[index]
        tokens = b""
        if lease.tokens:
            step = stored.chunk.space.shards.chunk_size * TOKEN_BYTES
            start = lease.positions[index] * step
            tokens = lease.tokens[start : start + step]
        self._state.store.commit(stored, checksum, tokens)
        counters = self._state.counters
        counters.stored_objects += 1
        path = lease.owner.data_path
        counters.stored_bytes[path] = counters.stored_bytes.get(path, 0) + stored.size
        return stored

    def _commit_late(self, registration: Registration, item: CommitItem) -> CommitResult:
        error = self._state.leases.missing(item.lease_id)
        slots = self._state.endings.acknowledge(item.lease_id, registration)
        self._state.counters.fail(error.reason)
        if not slots:
            self._state.counters.surplus_releases += 1
        return CommitResult(0, 0, slots or len(item.slots), error=error)


class _Reserving:
    """One item of a BeginStore call on its way through its chunks, head first."""

    def __init__(self, store: L1Store, rank: int, opened: _Opened, lease_id: int, protect: int) -> None:
        self.slots: list[SlotGrant] = []
        self.objects: list[StoredObject] = []
        self._store = store
        self._rank = rank
        self._chunks = opened.chunks
        self._lease_id = lease_id
        self._protect = protect
        self._tail_stamp = opened.tail_stamp
        self._full = False

    def chunk(self, position: int, groups: Sequence[int]) -> None:
        """Reserve what is absent of one chunk, all of it or nothing: a part is of no use."""
        found = {group: self._existing(position, group) for group in groups}
        self._full = self._full or not self._admits(position, [each for each in groups if not found[each]])
        fresh: dict[int, StoredObject] = {}
        for group in groups:
            if found[group] is None and not self._full:
                stored = self._reserve(position, group)
                if stored is None:
                    self._full = True
                else:
                    fresh[group] = stored
        if self._full:
            # Nothing can resume behind a gap: what follows is not worth evicting anything for.
            for stored in fresh.values():
                self._store.abort(stored)
            fresh.clear()
        sizes = self._chunks.space.shards.object_bytes
        for group in groups:
            stored = fresh.get(group)
            state = SlotState.RESERVED if stored else found[group] or SlotState.NO_SPACE
            offset = stored.offset if stored else 0
            self.slots.append(SlotGrant(position, group, offset, sizes[group], state))
        self.objects.extend(fresh.values())

    def _admits(self, position: int, groups: Sequence[int]) -> bool:
        """What has no room as a whole must not cost what others need."""
        chunks = self._chunks
        sizes = [chunks.space.shards.object_bytes[group] for group in groups]
        return self._store.admits(chunks.space, chunks.keys[position - chunks.first], sizes)

    def _existing(self, position: int, group: int) -> SlotState | None:
        chunks = self._chunks
        shard = chunks.space.shards.shard(self._rank, group)
        stored = self._store.lookup_object(chunks.space, chunks.keys[position - chunks.first], shard)
        if stored is None:
            return None
        return SlotState.ALREADY_STORED if stored.state is ObjectState.RESIDENT else SlotState.BEING_WRITTEN

    def _reserve(self, position: int, group: int) -> StoredObject | None:
        chunks = self._chunks
        index = position - chunks.first
        return self._store.reserve(
            chunks.space,
            chunks.keys[index],
            chunks.keys[index - 1] if index else chunks.parent_key,
            chunks.space.shards.shard(self._rank, group),
            lease_id=self._lease_id,
            stamp=self._tail_stamp + len(chunks.keys) - 1 - index,
            protect=self._protect,
        )


def _named_slots(item: CommitItem, count: int) -> dict[int, bytes]:
    """The slots to publish, each with its checksum. Raises RangeInvalid or InvalidArgument."""
    named = item.slots or range(count)
    for index in named:
        if not 0 <= index < count:
            raise RangeInvalid(
                f"Lease {item.lease_id} has {count} slots; slot {index} is not among them.",
                first=index,
                count=1,
                limit=count,
            )
    if not item.checksums:
        return dict.fromkeys(named, b"")
    if len(item.checksums) != len(named) or any(len(c) not in (0, CHECKSUM_BYTES) for c in item.checksums):
        raise InvalidArgument(
            "checksums", f"must be one of {CHECKSUM_BYTES} bytes for each slot that is named"
        )
    return dict(zip(named, item.checksums, strict=True))
