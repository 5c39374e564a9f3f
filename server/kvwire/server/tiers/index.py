"""What a lower tier holds, in memory: which chunks, how recent, how large, whose. Pure."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from kvwire.server.fetch.planning import shards_of
from kvwire.server.store.listing import Listing
from kvwire.server.tiers.entries import TierChunk, TierSpace, Writing
from kvwire.server.tiers.format import MANIFEST, object_name
from kvwire.server.tiers.recency import Recency

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kvwire.server.store import Chunk
    from kvwire.server.tiers.entries import IndexListener
    from kvwire.server.tiers.format import Manifest

NEWEST: Final = 1 << 62
ALREADY: Final = "already there"


class TierIndex:
    """Single-threaded. Bytes are exact, as stored with headers: objects, manifests, those being written, and
    those that are to be deleted and may still be there (`doomed`, by name).

    The unit of eviction is the chunk. Recency is the memory tier's own: stamps of which a larger one is
    later, and of one prompt the head has the latest.
    """

    def __init__(self, capacity: int, overhead: int, listener: IndexListener | None = None) -> None:
        self.capacity = capacity
        self.overhead = overhead
        self.listener = listener
        self.spaces: dict[str, TierSpace] = {}
        self.doomed: dict[str, int] = {}
        self.object_bytes = 0
        self.writing_bytes = 0
        self.manifest_bytes = 0
        self.doomed_bytes = 0
        self.objects = 0
        self.evicted_chunks = 0
        self.on_doomed: Callable[[], None] = lambda: None
        self._chunks: dict[bytes, TierChunk] = {}
        self._recency = Recency()
        self._used_by: dict[str, int] = {}
        self._quotas: dict[str, int] = {}
        self._listing: Listing[TierChunk] = Listing()

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[TierChunk]:
        return iter(self._chunks.values())

    @property
    def used(self) -> int:
        """All bytes that are there, or may be, or are about to be."""
        return self.object_bytes + self.writing_bytes + self.manifest_bytes + self.doomed_bytes

    @property
    def kept(self) -> int:
        """What is left of `used` when everything doomed has gone."""
        return self.used - self.doomed_bytes

    def get(self, key: bytes) -> TierChunk | None:
        return self._chunks.get(key)

    def open_space(self, folder: str, manifest: Manifest, size: int) -> TierSpace:
        """A folder with its manifest, which has `size` bytes. Idempotent."""
        space = self.spaces.get(folder)
        if space is None:
            space = self.spaces[folder] = TierSpace(folder, manifest, size, self.overhead)
            self.manifest_bytes += size
        return space

    def found(self, space: TierSpace, key: bytes, shard: int, size: int) -> bool:
        """An object of a former run. False: it cannot be one, or has no room; it is to be deleted."""
        if shard >= space.shards.num_shards or size != space.sizes[shard]:
            return False
        chunk = self._chunks.get(key)
        if chunk is not None and (chunk.space is not space or chunk.mask >> shard & 1):
            return chunk.space is space
        if chunk is None:
            chunk = self._add(space, key, b"", 0)
        self._hold(chunk, shard)
        return True

    def reserve(self, space: TierSpace, key: bytes, parent: bytes, shard: int, stamp: int) -> Writing | str:
        """Room for an object, accounted from now on, or the reason why there is none.

        Evicts what is less recent than `stamp`, the tenant's own first where that is over its quota.
        """
        chunk = self._chunks.get(key)
        if chunk is not None and chunk.space is not space:
            if not chunk.idle:
                return "another layout of this chunk is in use"
            self._remove(chunk)
            chunk = None
        if chunk is not None and (chunk.mask >> shard & 1 or shard in chunk.writing):
            return ALREADY
        size = space.sizes[shard]
        if chunk is not None:
            # Not to be evicted for its own sake.
            chunk.stamp = max(chunk.stamp, stamp)
        space.chunks += 1  # making room must not close it
        problem = self._make_room(space.tenant, size, stamp)
        space.chunks -= 1
        if problem:
            self._close_if_empty(space)
            return problem
        chunk = chunk or self._add(space, key, parent, stamp)
        writing = Writing(chunk, shard, size)
        chunk.begin(writing)
        self.writing_bytes += size
        self._charge(space.tenant, size)
        return writing

    def commit(self, writing: Writing) -> bool:
        """The object is there. False: it is not wanted any more, and doomed."""
        chunk = writing.chunk
        if writing.cancelled:
            self.abort(writing, left=True)
            return False
        self._end_writing(writing)
        self._hold(chunk, writing.shard)
        return True

    def abort(self, writing: Writing, *, left: bool) -> None:
        """It will not be there; `left`: something of it may be, and is to be deleted."""
        chunk = writing.chunk
        self._end_writing(writing)
        if left:
            self._doom(object_name(chunk.space.folder, chunk.key, writing.shard), writing.size)
        self._forget_if_empty(chunk)

    def pin(self, chunk: TierChunk) -> None:
        chunk.pins += 1

    def unpin(self, chunk: TierChunk) -> None:
        chunk.pins -= 1
        self._recency.offer(chunk)

    def touch(self, keys: Sequence[bytes], stamps: Sequence[int]) -> None:
        """What is there of a prompt was used, head first as the stamps are."""
        get = self._chunks.get
        for key, stamp in zip(keys, stamps, strict=True):
            chunk = get(key)
            if chunk is not None:
                chunk.stamp = stamp

    def follow(self, chunks: Iterable[Chunk]) -> None:
        """Take the recency over that chunks have in memory."""
        get = self._chunks.get
        for chunk in chunks:
            entry = get(chunk.key)
            if entry is not None:
                entry.stamp = chunk.stamp

    def follow_up(self, chunk: Chunk) -> None:
        """The same for a chunk and those before it, which are as recent or more."""
        above: Chunk | None = chunk
        while above is not None:
            entry = self._chunks.get(above.key)
            if entry is not None:
                if entry.stamp == above.stamp and above is not chunk:
                    return
                entry.stamp = above.stamp
            above = above.parent

    def drop_object(self, chunk: TierChunk, shard: int, generation: int) -> bool:
        """An object was found damaged or gone. False: it was dropped before, or is another one by now."""
        there = self._chunks.get(chunk.key) is chunk and chunk.mask >> shard & 1
        if not there or chunk.generation(shard) != generation:
            return False
        size = chunk.space.sizes[shard]
        chunk.drops = {**(chunk.drops or {}), shard: generation + 1}
        chunk.mask &= ~(1 << shard)
        self.objects -= 1
        self.object_bytes -= size
        chunk.size -= size
        self._charge(chunk.space.tenant, -size)
        if not chunk.is_complete:
            self._gone(chunk)
        self._doom(object_name(chunk.space.folder, chunk.key, shard), size)
        self._forget_if_empty(chunk)
        return True

    def evict(self, keys: Iterable[bytes]) -> tuple[int, int]:
        """Drop these chunks unless they are in use. Returns (chunks dropped, chunks kept)."""
        chosen = [chunk for key in dict.fromkeys(keys) if (chunk := self._chunks.get(key)) is not None]
        return self._drop_all(chosen)

    def clear(self, matches: Callable[[TierChunk], bool] | None = None) -> tuple[int, int]:
        """Drop what is not in use, and what is being written as soon as it is there.

        Returns (chunks dropped, chunks kept).
        """
        chosen = [chunk for chunk in self if matches is None or matches(chunk)]
        everything = len(chosen) == len(self) and all(chunk.idle for chunk in chosen)
        if everything and self.listener is not None:
            # One event says it all.
            for chunk in chosen:
                chunk.announced = False
            self.listener.on_cleared()
        for chunk in chosen:
            for writing in chunk.writing.values():
                writing.cancelled = True
        return self._drop_all(chosen)

    def shrink(self) -> None:
        """Evict until everything fits, as after a start with a smaller capacity or quota."""
        self._meet_quotas()
        self._evict_bytes(self.kept - self.capacity, NEWEST, None, partly=True)

    def close_empty_spaces(self) -> None:
        """Manifests that a former run has left alone."""
        for space in list(self.spaces.values()):
            self._close_if_empty(space)

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Limits in bytes by tenant (digest of a salt; "": those without); 0: none. Evicts what is above."""
        self._quotas = {tenant: limit for tenant, limit in quotas.items() if limit > 0}
        self._recency.watch(self._quotas, self)
        self._meet_quotas()

    def usage(self, tenant: str) -> int:
        """Bytes of a tenant's objects, those being written included."""
        return self._used_by.get(tenant, 0)

    def tenants(self) -> dict[str, int]:
        return dict(self._used_by)

    def page(self, after: int, count: int) -> list[TierChunk]:
        """Up to `count` chunks with a serial above `after`, in the order of their serials."""
        return list(islice(self._listing.after(after), count))

    def deleted(self, names: Iterable[str]) -> None:
        """What was doomed is gone."""
        for name in names:
            self.doomed_bytes -= self.doomed.pop(name, 0)

    def doom_stray(self, name: str, size: int) -> None:
        """Something of a former run that is of no use."""
        self._doom(name, size)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all accounting agrees. Slow."""
        from kvwire.server.tiers.integrity import check_index

        check_index(self)

    def _meet_quotas(self) -> None:
        for tenant, limit in self._quotas.items():
            self._evict_bytes(self.usage(tenant) - limit, NEWEST, tenant, partly=True)

    def _make_room(self, tenant: str, size: int, before: int) -> str:
        limit = self._quotas.get(tenant)
        if limit is not None:
            excess = self.usage(tenant) + size - limit
            if not self._evict_bytes(excess, before, tenant):
                return "over the tenant's quota"
        if not self._evict_bytes(self.kept + size - self.capacity, before, None):
            return "no room"
        return ""

    def _evict_bytes(self, excess: int, before: int, tenant: str | None, *, partly: bool = False) -> bool:
        """Evict that much, or nothing at all unless `partly`. False: not that much."""
        victims: list[TierChunk] = []
        while excess > 0:
            victim = self._recency.victim(before, tenant)
            if victim is None:
                break
            victims.append(victim)
            excess -= victim.size
        if excess > 0 and not partly:
            for chunk in victims:
                self._recency.offer(chunk)
            return False
        for chunk in victims:
            self._remove(chunk)
        self.evicted_chunks += len(victims)
        return excess <= 0

    def _drop_all(self, chosen: Sequence[TierChunk]) -> tuple[int, int]:
        idle = [chunk for chunk in chosen if chunk.idle]
        for chunk in idle:
            self._remove(chunk)
        return len(idle), len(chosen) - len(idle)

    def _add(self, space: TierSpace, key: bytes, parent: bytes, stamp: int) -> TierChunk:
        chunk = self._chunks[key] = TierChunk(key, space, parent, stamp)
        self._listing.add(chunk)
        space.chunks += 1
        return chunk

    def _hold(self, chunk: TierChunk, shard: int) -> None:
        size = chunk.space.sizes[shard]
        chunk.mask |= 1 << shard
        chunk.size += size
        self.objects += 1
        self.object_bytes += size
        self._charge(chunk.space.tenant, size)
        self._recency.offer(chunk)
        if chunk.is_complete and not chunk.announced:
            chunk.announced = True
            if self.listener is not None:
                self.listener.on_stored(chunk)

    def _end_writing(self, writing: Writing) -> None:
        writing.chunk.end(writing)
        self.writing_bytes -= writing.size
        self._charge(writing.chunk.space.tenant, -writing.size)
        self._recency.offer(writing.chunk)

    def _remove(self, chunk: TierChunk) -> None:
        self._gone(chunk)
        for shard in shards_of(chunk.mask):
            self._doom(object_name(chunk.space.folder, chunk.key, shard), chunk.space.sizes[shard])
        self.objects -= chunk.mask.bit_count()
        self.object_bytes -= chunk.size
        self._charge(chunk.space.tenant, -chunk.size)
        chunk.mask = chunk.size = 0
        self._forget_if_empty(chunk)

    def _gone(self, chunk: TierChunk) -> None:
        if chunk.announced:
            chunk.announced = False
            if self.listener is not None:
                self.listener.on_removed(chunk)

    def _forget_if_empty(self, chunk: TierChunk) -> None:
        if chunk.mask or chunk.writing:
            return
        del self._chunks[chunk.key]
        self._listing.remove(chunk)
        chunk.space.chunks -= 1
        self._close_if_empty(chunk.space)

    def _close_if_empty(self, space: TierSpace) -> None:
        if not space.chunks:
            del self.spaces[space.folder]
            self.manifest_bytes -= space.manifest_bytes
            self._doom(f"{space.folder}/{MANIFEST}", space.manifest_bytes)

    def _doom(self, name: str, size: int) -> None:
        self.doomed_bytes += size - self.doomed.get(name, 0)
        self.doomed[name] = size
        self.on_doomed()

    def _charge(self, tenant: str, size: int) -> None:
        used = self._used_by.get(tenant, 0) + size
        if used:
            self._used_by[tenant] = used
        else:
            self._used_by.pop(tenant, None)
