from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.server.store.boundary import Hit, last_boundary
from kvwire.server.store.events import RemovedChunk, StoredChunk
from kvwire.server.store.eviction import Eviction
from kvwire.server.store.integrity import check_store
from kvwire.server.store.objects import Chunk, ObjectRef, ObjectState, Space, StoredObject
from kvwire.server.store.pins import PINNED_SHARE, KeyPins
from kvwire.server.store.tenants import Tenants
from kvwire.server.store.tree import PrefixTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvwire.server.store.allocator import ExtentAllocator
    from kvwire.server.store.events import StoreListener
    from kvwire.server.store.policy import EvictionPolicy


class L1Store:
    """Index, memory and eviction of one arena. It knows pins and states, not who holds them.

    The unit of eviction is the chunk with all its shards. Bytes are exact: resident + reserved + quarantined
    is what the allocator has handed out.
    """

    def __init__(
        self, allocator: ExtentAllocator, policy: EvictionPolicy, listener: StoreListener | None = None
    ) -> None:
        self.allocator = allocator
        self.policy = policy
        self.listener = listener
        self.tree = PrefixTree(policy)
        self.tenants = Tenants()
        self.on_sealed: Callable[[StoredObject], None] | None = None
        self.key_pins = KeyPins(int(allocator.capacity * PINNED_SHARE))
        self.resident_bytes = 0
        self.reserved_bytes = 0
        self.quarantined_bytes = 0
        self.resident_objects = 0
        self.evictable_bytes = 0
        self.eviction = Eviction(self)
        self.evict_to = self.eviction.evict_to
        self.clear = self.eviction.clear
        self._index = self.tree.index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def evicted_chunks(self) -> int:
        return self.eviction.chunks

    @property
    def evicted_bytes(self) -> int:
        return self.eviction.bytes

    def chunks(self) -> Iterator[Chunk]:
        return iter(self._index.values())

    def get(self, key: bytes, space: Space | None = None) -> Chunk | None:
        chunk = self._index.get(key)
        return chunk if chunk is None or space is None or chunk.space is space else None

    def find(self, space: Space, keys: Sequence[bytes]) -> Hit:
        """Where a prompt of these chunks can resume. Changes nothing."""
        need = space.shards.full_mask
        if not need:
            return self._find_in_windows(space, keys)
        get = self._index.get
        chunks: list[Chunk] = []
        for key in keys:
            chunk = get(key)
            if chunk is None or chunk.mask & need != need or chunk.space is not space:
                break
            chunks.append(chunk)
        windows = space.shards.windows
        if windows:
            del chunks[last_boundary(windows, [chunk.mask for chunk in chunks], len(chunks)) :]
        return Hit(len(chunks), 0, chunks)

    def pin(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            if chunk.idle:
                self._count_evictable(chunk, -chunk.size)
            chunk.pins += 1

    def unpin(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            chunk.pins -= 1
            if not chunk.pins:
                self._became_idle(chunk)

    def pin_keys(self, keys: Iterable[bytes]) -> None:
        """Keep the chunks of these keys from now on, present or stored later, as far as there is room."""
        pins = self.key_pins
        for key in keys:
            pins.keys.add(key)
            chunk = self._index.get(key)
            if chunk is not None and not chunk.kept:
                self._keep_if_pinned(chunk)

    def unpin_keys(self, keys: Iterable[bytes]) -> None:
        pins = self.key_pins
        for key in keys:
            pins.keys.discard(key)
            pins.over.pop(key, None)
            chunk = self._index.get(key)
            if chunk is not None and chunk.kept:
                pins.let_go(chunk)
                if not chunk.pins:
                    self._became_evictable(chunk)
        for key in list(pins.over):
            self.pin_keys((key,))

    def refresh(self, chain: Sequence[Chunk | None]) -> int:
        """Renew the recency of a chain, head first (None: not there yet). Returns its earliest stamp.

        The i-th of n gets the returned stamp + n - 1 - i, which a chunk created in its place takes too.
        """
        stamps = self.policy.stamps(len(chain))
        for chunk, stamp in zip(chain, stamps, strict=True):
            if chunk is not None:
                chunk.stamp = stamp
        return stamps.stop + 1

    def refresh_chain(
        self, space: Space, before: Sequence[bytes], keys: Sequence[bytes]
    ) -> tuple[list[Chunk | None], int]:
        """`refresh` for a range of a prompt, with what is there of the chain `before` it.

        Returns the chunks of `keys`, and the earliest stamp. A gap in the chain does not make its head older.
        """
        nearest = next((found for key in reversed(before) if (found := self.get(key, space))), None)
        present = [self.get(key, space) for key in keys]
        return present, self.refresh([*self.tree.ancestry(nearest), *present])

    def fits(self, size: int) -> bool:
        """Whether an object of this size could ever be stored."""
        return self.allocator.rounded(size) <= self.allocator.capacity

    def admits(self, space: Space, key: bytes, sizes: Sequence[int]) -> bool:
        """Whether absent objects of these sizes could be there together, if all that is idle made way.

        If not, they will not come.
        """
        if not sizes or self.eviction.could_hold(self.tenants.of(space), sizes):
            return True
        chunk = self.get(key, space)
        if chunk is not None:
            self._note_gap(chunk)
        return False

    def lookup_object(self, space: Space, key: bytes, shard: int) -> StoredObject | None:
        chunk = self._index.get(key)
        return None if chunk is None or chunk.space is not space else chunk.shards[shard]

    def reserve(
        self,
        space: Space,
        key: bytes,
        parent_key: bytes,
        shard: int,
        *,
        lease_id: int,
        stamp: int,
        protect: int,
    ) -> StoredObject | None:
        """A slot for an absent object, pinned until commit, abort or quarantine. None: no memory for it.

        Evicts what it must, but no chunk with a stamp from `protect` on, and nothing if that could not help.
        """
        chunk = self._index.get(key)
        if chunk is not None and chunk.space is not space and not self._drop_stale(chunk, space):
            return None
        use = self.tenants.of(space)
        size = space.shards.object_bytes[shard % space.shards.num_groups]
        offset = self.eviction.make_room(use, size, protect)
        # Making room may have evicted the chunk itself, unless the caller has refreshed it.
        chunk = self._index.get(key)
        if offset is None:
            if chunk is not None:
                self._note_gap(chunk)
            return None
        if chunk is None:
            chunk = self.tree.add(key, parent_key, space, stamp)
            self._keep_if_pinned(chunk)
        extent = self.allocator.rounded(size)
        stored = StoredObject(chunk, shard, offset, size, extent, lease_id)
        chunk.shards[shard] = stored
        self.pin((chunk,))
        self.reserved_bytes += extent
        use.reserved += extent
        use.arrivals += 1
        return stored

    def commit(self, stored: StoredObject, checksum: bytes = b"", tokens: bytes = b"") -> None:
        """Make a reserved object resident."""
        _expect(stored, ObjectState.RESERVED)
        chunk = stored.chunk
        first = chunk.size == 0
        stored.state = ObjectState.RESIDENT
        stored.checksum = checksum
        chunk.mask |= 1 << stored.shard
        chunk.size += stored.extent
        self.key_pins.resized(chunk, stored.extent)
        self.reserved_bytes -= stored.extent
        self.resident_bytes += stored.extent
        self.resident_objects += 1
        space = chunk.space
        space.resident_bytes += stored.extent
        space.use.reserved -= stored.extent
        space.use.resident += stored.extent
        if first:
            self.policy.inserted(chunk)
        else:
            self.policy.resized(chunk, stored.extent)
        if chunk.is_complete:
            self._completed(chunk, tokens)
        if checksum:
            self.sealed(stored)
        self.unpin((chunk,))

    def sealed(self, stored: StoredObject) -> None:
        """A resident object has its checksum now; whoever keeps copies is told. It must not call back."""
        if self.on_sealed is not None:
            self.on_sealed(stored)

    def abort(self, stored: StoredObject) -> None:
        """Free a reserved object that its writer will not touch again."""
        self._withdraw(stored, ObjectState.FREED)
        self.allocator.free(stored.offset)

    def quarantine(self, stored: StoredObject) -> None:
        """Take a reserved object out of the index; its memory stays taken until `release`."""
        self._withdraw(stored, ObjectState.QUARANTINED)
        self.quarantined_bytes += stored.extent
        stored.chunk.space.use.quarantined += stored.extent

    def release(self, stored: StoredObject) -> None:
        """Free a quarantined object."""
        _expect(stored, ObjectState.QUARANTINED)
        stored.state = ObjectState.FREED
        self.quarantined_bytes -= stored.extent
        stored.chunk.space.use.quarantined -= stored.extent
        self.allocator.free(stored.offset)

    def ref(self, stored: StoredObject) -> ObjectRef:
        rank, group = divmod(stored.shard, stored.chunk.space.shards.num_groups)
        return ObjectRef(
            stored.chunk.key, rank, group, stored.offset, stored.size, stored.lease_id, stored.checksum
        )

    def resolve(self, ref: ObjectRef) -> StoredObject | None:
        """The object that a reference names, if it is still resident."""
        chunk = self._index.get(ref.key)
        if chunk is None:
            return None
        shard = chunk.space.shards.shard(ref.rank, ref.group_index)
        stored = chunk.shards[shard] if shard < len(chunk.shards) else None
        if stored is None or stored.lease_id != ref.lease_id or stored.offset != ref.offset:
            return None
        return stored if stored.state is ObjectState.RESIDENT else None

    def discard(self, stored: StoredObject) -> None:
        """Make a resident object absent at once; while leases hold its chunk, its memory stays as it is."""
        _expect(stored, ObjectState.RESIDENT)
        chunk = stored.chunk
        chunk.shards[stored.shard] = None
        chunk.mask &= ~(1 << stored.shard)
        chunk.dropped = (*chunk.dropped, stored)
        stored.state = ObjectState.DROPPED
        self.resident_objects -= 1
        if not chunk.is_complete:
            self._gone(chunk, evicted=False)
        self._note_gap(chunk)
        if not chunk.pins:
            if not chunk.kept:
                self._count_evictable(chunk, -chunk.size)
            self._became_idle(chunk)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all accounting, links, masks and states agree. Slow."""
        check_store(self)

    def _find_in_windows(self, space: Space, keys: Sequence[bytes]) -> Hit:
        found = [self.get(key, space) for key in keys]
        masks = [0 if chunk is None else chunk.mask for chunk in found]
        boundary = last_boundary(space.shards.windows, masks, len(masks))
        first = max(boundary - space.shards.windows[-1][0], 0)
        return Hit(boundary, first, [chunk for chunk in found[first:boundary] if chunk is not None])

    def remove(self, chunk: Chunk, *, evicted: bool) -> None:
        """Drop an idle chunk with all it has. `evicted`: others need the memory."""
        self._gone(chunk, evicted=evicted)
        self.policy.removed(chunk, evicted=evicted)
        if not chunk.kept:
            self._count_evictable(chunk, -chunk.size)
        for index, stored in enumerate(chunk.shards):
            if stored is not None:
                chunk.shards[index] = None
                self.resident_objects -= 1
                self._free_resident(stored)
        chunk.mask = 0
        self._forget(chunk)

    def _became_idle(self, chunk: Chunk) -> None:
        for stored in chunk.dropped:
            self._free_resident(stored)
            self.policy.resized(chunk, -stored.extent)
        chunk.dropped = ()
        if not chunk.size:
            self._forget(chunk)
        elif not chunk.kept:
            self._became_evictable(chunk)

    def _became_evictable(self, chunk: Chunk) -> None:
        self._count_evictable(chunk, chunk.size)
        if chunk.is_evictable_leaf:
            self.policy.offer(chunk)

    def _count_evictable(self, chunk: Chunk, change: int) -> None:
        self.evictable_bytes += change
        chunk.space.use.evictable += change

    def _keep_if_pinned(self, chunk: Chunk) -> None:
        if self.key_pins.wants(chunk):
            if chunk.idle:
                self._count_evictable(chunk, -chunk.size)
            self.key_pins.hold(chunk)

    def _forget(self, chunk: Chunk) -> None:
        if chunk.kept:
            self.key_pins.let_go(chunk)
        self.tree.remove(chunk)

    def _free_resident(self, stored: StoredObject) -> None:
        stored.state = ObjectState.FREED
        stored.chunk.size -= stored.extent
        self.key_pins.resized(stored.chunk, -stored.extent)
        space = stored.chunk.space
        space.resident_bytes -= stored.extent
        space.use.resident -= stored.extent
        self.resident_bytes -= stored.extent
        self.allocator.free(stored.offset)

    def _withdraw(self, stored: StoredObject, state: ObjectState) -> None:
        _expect(stored, ObjectState.RESERVED)
        chunk = stored.chunk
        stored.state = state
        chunk.shards[stored.shard] = None
        self.reserved_bytes -= stored.extent
        chunk.space.use.reserved -= stored.extent
        self._note_gap(chunk)
        self.unpin((chunk,))

    def _note_gap(self, chunk: Chunk) -> None:
        """A shard of this chunk will not come: unless complete without it, nothing can resume behind it."""
        if not chunk.is_complete:
            chunk.broken = True
            self.tree.refile(chunk)

    def _drop_stale(self, chunk: Chunk, space: Space) -> bool:
        """Make way where a former layout of the same namespace left a chunk."""
        if chunk.pins or chunk.space.root != space.root:
            return False
        self.remove(chunk, evicted=False)
        return True

    def _completed(self, chunk: Chunk, tokens: bytes) -> None:
        chunk.broken = False
        self.tree.refile(chunk)
        if not chunk.announced:
            chunk.announced = True
            if self.listener:
                space = chunk.space
                self.listener.on_stored(
                    StoredChunk(chunk.key, chunk.parent_key, space.root, space.base_root, chunk.size, tokens)
                )

    def _gone(self, chunk: Chunk, *, evicted: bool) -> None:
        if chunk.announced:
            chunk.announced = False
            if self.listener:
                space = chunk.space
                self.listener.on_removed(
                    RemovedChunk(chunk.key, space.root, space.base_root, chunk.size, evicted)
                )


def _expect(stored: StoredObject, state: ObjectState) -> None:
    if stored.state is not state:
        raise RuntimeError(f"object is {stored.state.name}, not {state.name}")
