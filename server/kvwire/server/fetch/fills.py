"""Objects that this server itself brings into memory: reserved, filled, then published or given back.

Pure. What is reserved here is under no lease and has no deadline: whoever fills it ends it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvwire.server.fetch.planning import shards_of
from kvwire.server.store import ObjectState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvwire.server.leases import LeaseTable
    from kvwire.server.store import Chunk, L1Store, Space, StoredObject


@dataclass(frozen=True, slots=True)
class Survey:
    """What is there of a prompt, per chunk, as masks of shards.

    `coming`: a fill brings it. `closed`: it cannot be brought, because a client writes it, or a former layout
    holds the place.
    """

    resident: list[int]
    coming: list[int]
    closed: list[int]


@dataclass(slots=True, eq=False)
class Fill:
    """Objects reserved together, by chunk index, until each has ended. `full`: others had no room."""

    id: int
    objects: dict[StoredObject, int] = field(default_factory=dict)
    full: bool = False


@dataclass(slots=True, eq=False)
class Hold:
    """Pins that keep a prompt in memory until somebody has leased it. One that has ended takes no more."""

    chunks: list[Chunk] = field(default_factory=list)
    ended: bool = False


class Fills:
    """Every object ends once, by `commit`, `abort`, or `quarantine` and then `release`."""

    def __init__(self, store: L1Store, leases: LeaseTable) -> None:
        self._store = store
        self._leases = leases
        self._live: dict[int, Fill] = {}
        self._quarantined: dict[StoredObject, None] = {}
        self._holds: dict[Hold, None] = {}

    def __len__(self) -> int:
        return len(self._live)

    @property
    def reserved(self) -> Iterator[StoredObject]:
        return (stored for fill in self._live.values() for stored in fill.objects)

    @property
    def quarantined(self) -> Iterator[StoredObject]:
        return iter(self._quarantined)

    @property
    def held(self) -> Iterator[Chunk]:
        return (chunk for hold in self._holds for chunk in hold.chunks)

    def survey(self, space: Space, keys: Sequence[bytes]) -> Survey:
        found = Survey([0] * len(keys), [0] * len(keys), [0] * len(keys))
        for index, key in enumerate(keys):
            chunk = self._store.get(key)
            if chunk is None:
                continue
            if chunk.space is not space:
                # Without pins it makes way.
                found.closed[index] = -1 if chunk.pins or chunk.space.root != space.root else 0
                continue
            found.resident[index] = chunk.mask
            if chunk.pins:
                found.coming[index], found.closed[index] = self._reserved(chunk)
        return found

    def room(self, space: Space, keys: Sequence[bytes], share: float = 1.0) -> int:
        """Bytes that could be had for this prompt without evicting any of it.

        So that leases, pins and writers hold no more than a share of the memory then.
        """
        store, allocator = self._store, self._store.allocator
        own = (store.get(key, space) for key in keys)
        idle = sum(chunk.size for chunk in own if chunk is not None and chunk.idle)
        in_use = allocator.used - store.evictable_bytes
        room = int(allocator.capacity * share) - in_use
        use = store.tenants.of(space)
        if use.limit:
            room = min(room, use.limit - use.used + use.evictable)
        return max(0, room - idle)

    def extents(self, space: Space) -> list[int]:
        """Bytes that an object takes, by its group."""
        return [self._store.allocator.rounded(size) for size in space.shards.object_bytes]

    def begin(self, space: Space, keys: Sequence[bytes], wanted: Sequence[tuple[int, int]]) -> Fill:
        """Reserve what is absent of `wanted` (chunk of the prompt, mask of shards), which is head first.

        A chunk that has no room ends it. Nothing is evicted unless all of it could have room.
        """
        fill = Fill(self._leases.take_id())
        sizes = self.extents(space)
        absent = [shard for index, mask in wanted for shard in self._absent(space, keys[index], mask)]
        if sum(sizes[shard % len(sizes)] for shard in absent) > self.room(space, keys):
            fill.full = True
            return fill
        protect = self._store.refresh(())
        _, tail_stamp = self._store.refresh_chain(space, (), keys)
        last = len(keys) - 1
        for index, mask in wanted:
            stamp = tail_stamp + last - index
            if not self._reserve(fill, space, keys, index, mask, stamp=stamp, protect=protect):
                fill.full = True
                break
        if fill.objects:
            self._live[fill.id] = fill
        return fill

    def writes(self, space: Space, key: bytes, shard: int) -> StoredObject | None:
        """The object that a fill is bringing, if one is."""
        stored = self._store.lookup_object(space, key, shard)
        return stored if stored is not None and self._is_ours(stored) else None

    def commit(self, stored: StoredObject, checksum: bytes, tokens: bytes, hold: Hold | None = None) -> None:
        """Publish an object that is there whole. `tokens` are those of its chunk, packed, if known."""
        self._end(stored)
        if hold is not None:
            self.keep(hold, (stored.chunk,))
        self._store.commit(stored, checksum, tokens)

    def abort(self, stored: StoredObject) -> None:
        """Give an object back that nothing touches any more."""
        self._end(stored)
        self._store.abort(stored)

    def quarantine(self, stored: StoredObject) -> None:
        """Give an object up while something may still write to it: its memory waits for `release`."""
        self._end(stored)
        self._store.quarantine(stored)
        self._quarantined[stored] = None

    def release(self, stored: StoredObject) -> None:
        """Nothing touches a quarantined object any more."""
        del self._quarantined[stored]
        self._store.release(stored)

    def hold(self) -> Hold:
        hold = Hold()
        self._holds[hold] = None
        return hold

    def keep(self, hold: Hold, chunks: Sequence[Chunk]) -> None:
        """Pin chunks until the hold ends."""
        if not hold.ended:
            self._store.pin(chunks)
            hold.chunks += chunks

    def keep_resident(self, hold: Hold, space: Space, keys: Sequence[bytes], needs: Sequence[int]) -> None:
        """Pin what is there of the needed shards, chunk by chunk."""
        found = [self._store.get(key, space) for key in keys[: len(needs)]]
        self.keep(hold, [c for c, need in zip(found, needs, strict=True) if c is not None and c.mask & need])

    def let_go(self, hold: Hold) -> None:
        """End a hold. Idempotent."""
        if not hold.ended:
            hold.ended = True
            del self._holds[hold]
            self._store.unpin(hold.chunks)
            hold.chunks.clear()

    def _reserved(self, chunk: Chunk) -> tuple[int, int]:
        """The shards that fills bring, and those that clients write."""
        ours = theirs = 0
        for stored in chunk.shards:
            if stored is not None and stored.state is ObjectState.RESERVED:
                if self._is_ours(stored):
                    ours |= 1 << stored.shard
                else:
                    theirs |= 1 << stored.shard
        return ours, theirs

    def _is_ours(self, stored: StoredObject) -> bool:
        fill = self._live.get(stored.lease_id)
        return fill is not None and stored in fill.objects

    def _absent(self, space: Space, key: bytes, mask: int) -> list[int]:
        lookup = self._store.lookup_object
        return [shard for shard in shards_of(mask) if lookup(space, key, shard) is None]

    def _reserve(
        self,
        fill: Fill,
        space: Space,
        keys: Sequence[bytes],
        index: int,
        mask: int,
        *,
        stamp: int,
        protect: int,
    ) -> bool:
        """Reserve what is absent of one chunk, all of it or nothing: a part is of no use."""
        fresh: list[StoredObject] = []
        for shard in self._absent(space, keys[index], mask):
            stored = self._store.reserve(
                space,
                keys[index],
                keys[index - 1] if index else b"",
                shard,
                lease_id=fill.id,
                stamp=stamp,
                protect=protect,
            )
            if stored is None:
                for each in fresh:
                    self._store.abort(each)
                return False
            fresh.append(stored)
        fill.objects.update(dict.fromkeys(fresh, index))
        return True

    def _end(self, stored: StoredObject) -> None:
        fill = self._live[stored.lease_id]
        del fill.objects[stored]
        if not fill.objects:
            del self._live[fill.id]
