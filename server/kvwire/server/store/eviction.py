"""What makes way: on demand for one object, in the background for a fill, and because an operator said so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvwire.server.store.tenant_policy import TenantPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvwire.server.store.l1 import L1Store
    from kvwire.server.store.objects import Chunk, Space
    from kvwire.server.store.tenants import TenantUse

EVERYTHING: Final = 1 << 62


class Eviction:
    """Chooses what goes; the store removes it. `chunks` and `bytes` count what went to make room.

    `quota_chunks` is the part of it that went for a quota, `quota_refusals` counts objects that had no room
    in one.
    """

    def __init__(self, store: L1Store) -> None:
        self._store = store
        self._by_tenant = store.policy if isinstance(store.policy, TenantPolicy) else None
        self.chunks = 0
        self.bytes = 0
        self.quota_chunks = 0
        self.quota_refusals = 0

    def could_hold(self, use: TenantUse, sizes: Iterable[int]) -> bool:
        """Whether objects of these sizes could be there together, if all that is idle made way."""
        store, allocator = self._store, self._store.allocator
        need = sum(map(allocator.rounded, sizes))
        fits = use.excess(need) <= use.evictable
        self.quota_refusals += not fits
        return fits and need <= allocator.free_bytes + store.evictable_bytes

    def make_room(self, use: TenantUse, size: int, protect: int) -> int | None:
        """The offset of a new extent for a tenant. Evicts nothing if that could not help; None: no memory.

        A tenant gives way within its own quota before others do in the pool.
        """
        store, allocator = self._store, self._store.allocator
        need = allocator.rounded(size)
        if need > allocator.free_bytes + store.evictable_bytes or not self._fit_quota(use, need, protect):
            return None
        offset = allocator.allocate(size)
        if offset is not None:
            return offset
        while (victim := self._victim(protect)) is not None:
            self._evict(victim)
            offset = allocator.allocate(size)
            if offset is not None:
                return offset
        return None

    def evict_to(self, used_bytes: int, max_chunks: int = EVERYTHING) -> int:
        """Evict what is above quotas, then until at most `used_bytes` are in use, or nothing more can go.

        Returns the bytes freed.
        """
        allocator = self._store.allocator
        before, most = allocator.used, self.chunks + max_chunks
        self.evict_over_quota(max_chunks)
        while allocator.used > used_bytes and self.chunks < most:
            victim = self._victim(EVERYTHING)
            if victim is None:
                break
            self._evict(victim)
        return before - allocator.used

    def evict_over_quota(self, max_chunks: int = EVERYTHING) -> int:
        """Evict of the tenants above their quotas what is too much. Returns the bytes freed."""
        before, most = self._store.allocator.used, self.chunks + max_chunks
        for use in self._store.tenants.over():
            while self.chunks < most and use.excess() > 0 and self._evict_of(use, EVERYTHING):
                pass
        return before - self._store.allocator.used

    def drop(self, keys: Iterable[bytes]) -> tuple[int, int]:
        """Drop the chunks of these keys that are idle. Returns (chunks dropped, chunks kept)."""
        found = [chunk for key in dict.fromkeys(keys) if (chunk := self._store.get(key)) is not None]
        idle = [chunk for chunk in found if chunk.idle]
        for chunk in idle:
            self._store.remove(chunk, evicted=False)
        return len(idle), len(found) - len(idle)

    def clear(self, meant: Callable[[Space], bool] | None = None) -> tuple[int, int]:
        """Drop every chunk (of those namespaces) that is idle. Returns (chunks dropped, chunks kept)."""
        store = self._store
        chosen = [chunk for chunk in store.chunks() if meant is None or meant(chunk.space)]
        idle = [chunk for chunk in chosen if chunk.idle]
        everything = len(idle) == len(store)
        for chunk in idle:
            # One event says it all when nothing is left.
            chunk.announced = chunk.announced and not everything
            store.remove(chunk, evicted=False)
        if everything and store.listener:
            store.listener.on_cleared()
        return len(idle), len(chosen) - len(idle)

    def _fit_quota(self, use: TenantUse, need: int, protect: int) -> bool:
        if use.excess(need) <= use.evictable:
            while use.excess(need) > 0 and self._evict_of(use, protect):
                pass
        if use.excess(need) <= 0:
            return True
        self.quota_refusals += 1
        return False

    def _evict_of(self, use: TenantUse, protect: int) -> bool:
        """Evict the next chunk of a tenant for its quota. False: none may go."""
        victim = self._victim_of(use, protect)
        if victim is None:
            return False
        self.quota_chunks += 1
        self._evict(victim)
        return True

    def _evict(self, chunk: Chunk) -> None:
        self.chunks += 1
        self.bytes += chunk.size
        self._store.remove(chunk, evicted=True)

    def _victim(self, protect: int) -> Chunk | None:
        store = self._store
        for use in store.tenants.over():
            if (victim := self._victim_of(use, protect)) is not None:
                return victim
        victim = _first_idle(store.tree.unreachable, protect) or store.policy.victim(protect)
        if victim is None and store.evictable_bytes:
            victim = _inner_victim(store.chunks(), protect)
        return victim

    def _victim_of(self, use: TenantUse, protect: int) -> Chunk | None:
        victim = _first_idle(use.unreachable, protect)
        if victim is None and self._by_tenant is not None:
            victim = self._by_tenant.victim_of(use.tenant, protect)
        if victim is None and use.evictable:
            own = (chunk for chunk in self._store.chunks() if chunk.space.use is use)
            victim = _inner_victim(own, protect)
        return victim


def _first_idle(chunks: dict[bytes, Chunk], protect: int) -> Chunk | None:
    return next((chunk for chunk in chunks.values() if chunk.idle and chunk.stamp < protect), None)


def _inner_victim(chunks: Iterable[Chunk], protect: int) -> Chunk | None:
    """Every leaf is pinned: a head whose tail is in use goes only when there is nothing else."""
    idle = (chunk for chunk in chunks if chunk.idle and chunk.stamp < protect)
    return min(idle, key=lambda chunk: chunk.stamp, default=None)
