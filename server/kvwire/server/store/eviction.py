"""What makes way: on demand for one object, in the background for a fill, and because an operator said so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvwire.server.store.l1 import L1Store
    from kvwire.server.store.objects import Chunk

EVERYTHING: Final = 1 << 62


class Eviction:
    """Chooses what goes; the store removes it. `chunks` and `bytes` count what went to make room."""

    def __init__(self, store: L1Store) -> None:
        self._store = store
        self.chunks = 0
        self.bytes = 0

    def make_room(self, size: int, protect: int) -> int | None:
        """The offset of a new extent. Evicts nothing if that could not help; None: no memory for it."""
        store, allocator = self._store, self._store.allocator
        offset = allocator.allocate(size)
        if offset is not None:
            return offset
        if allocator.free_bytes + store.evictable_bytes < allocator.rounded(size):
            return None
        while (victim := self._victim(protect)) is not None:
            self._evict(victim)
            offset = allocator.allocate(size)
            if offset is not None:
                return offset
        return None

    def evict_to(self, used_bytes: int, max_chunks: int = EVERYTHING) -> int:
        """Evict until at most `used_bytes` are in use, or nothing more can go. Returns the bytes freed."""
        allocator = self._store.allocator
        before = allocator.used
        while allocator.used > used_bytes and max_chunks > 0:
            victim = self._victim(EVERYTHING)
            if victim is None:
                break
            self._evict(victim)
            max_chunks -= 1
        return before - allocator.used

    def clear(self, base_root: bytes | None = None) -> tuple[int, int]:
        """Drop every chunk (of one base namespace) that is idle. Returns (chunks dropped, chunks kept)."""
        store = self._store
        chosen = [chunk for chunk in store.chunks() if base_root in (None, chunk.space.base_root)]
        idle = [chunk for chunk in chosen if chunk.idle]
        everything = len(idle) == len(store)
        for chunk in idle:
            # One event says it all when nothing is left.
            chunk.announced = chunk.announced and not everything
            store.remove(chunk, evicted=False)
        if everything and store.listener:
            store.listener.on_cleared()
        return len(idle), len(chosen) - len(idle)

    def _evict(self, chunk: Chunk) -> None:
        self.chunks += 1
        self.bytes += chunk.size
        self._store.remove(chunk, evicted=True)

    def _victim(self, protect: int) -> Chunk | None:
        store = self._store
        for chunk in store.tree.unreachable.values():
            if chunk.idle and chunk.stamp < protect:
                return chunk
        return store.policy.victim(protect) or self._inner_victim(protect)

    def _inner_victim(self, protect: int) -> Chunk | None:
        # Every leaf is pinned: a head whose tail is in use goes only when the pool has nothing else.
        if not self._store.evictable_bytes:
            return None
        idle = [chunk for chunk in self._store.chunks() if chunk.idle and chunk.stamp < protect]
        return min(idle, key=lambda chunk: chunk.stamp, default=None)
